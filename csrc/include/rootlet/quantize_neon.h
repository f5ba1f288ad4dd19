// Activation quantisation on NEON. Meaning: quantize_scalar.h.
#pragma once
#include <arm_neon.h>

#include "rootlet/block_scale.h"
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE float block_top(const float* x) {
  uint32x4_t top = vdupq_n_u32(0);
  for (int i = 0; i < 8; ++i) top = vmaxq_u32(top, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i * 4)), vdupq_n_u32(0x7fffffffu)));
  return float_of(vmaxvq_u32(top));
}

RL_INLINE int32x4_t nearest(float32x4_t x) {
  return vsubq_s32(vreinterpretq_s32_f32(vaddq_f32(x, vdupq_n_f32(12582912.0f))), vdupq_n_s32(0x4b400000));
}

// Stores 32 values that fit int8, and returns their sum.
RL_INLINE int store_bytes(const int32x4_t (&n)[8], int8_t* to) {
  int32x4_t sum = vdupq_n_s32(0);
  for (int i = 0; i < 8; ++i) sum = vaddq_s32(sum, n[i]);
  for (int i = 0; i < 8; i += 2) vst1_s8(to + i * 4, vmovn_s16(vcombine_s16(vmovn_s32(n[i]), vmovn_s32(n[i + 1]))));
  return vaddvq_s32(sum);
}

RL_INLINE void quantize_block(const float* x, BlockScale scale, int8_t* q, ActScale* s) {
  int32x4_t n[8];
  for (int i = 0; i < 8; ++i) n[i] = scale.inverse == 0.0f ? vdupq_n_s32(0) : nearest(vmulq_n_f32(vld1q_f32(x + i * 4), scale.inverse));
  const int sum = store_bytes(n, q);
  *s = {scale.d, scale.d * static_cast<float>(sum), sum, 0, 0, 0};
}

RL_INLINE int quantize_rest(const float* x, float inverse, int8_t* low) {
  int32x4_t n[8];
  for (int i = 0; i < 8; ++i) {
    const float32x4_t y = vmulq_n_f32(vld1q_f32(x + i * 4), inverse);
    const float32x4_t rest = vsubq_f32(y, vcvtq_f32_s32(nearest(y)));
    n[i] = inverse == 0.0f ? vdupq_n_s32(0) : nearest(vmulq_n_f32(rest, kLowScale));
  }
  return store_bytes(n, low);
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
