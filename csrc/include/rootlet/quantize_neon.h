// Activation quantisation on NEON. Meaning: quantize_scalar.h.
#pragma once
#include <arm_neon.h>

#include "rootlet/block_scale.h"
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE void quantize_block(const float* x, int8_t* q, ActScale* s) {
  float32x4_t v[8];
  uint32x4_t top = vdupq_n_u32(0);
  for (int i = 0; i < 8; ++i) {
    v[i] = vld1q_f32(x + i * 4);
    top = vmaxq_u32(top, vandq_u32(vreinterpretq_u32_f32(v[i]), vdupq_n_u32(0x7fffffffu)));
  }
  const BlockScale scale = block_scale(float_of(vmaxvq_u32(top)));
  int32x4_t n[8];
  int32x4_t sum = vdupq_n_s32(0);
  for (int i = 0; i < 8; ++i) {
    const float32x4_t shifted = vaddq_f32(vmulq_n_f32(v[i], scale.inverse), vdupq_n_f32(12582912.0f));
    n[i] = scale.inverse == 0.0f ? vdupq_n_s32(0) : vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4b400000));
    sum = vaddq_s32(sum, n[i]);
  }
  for (int i = 0; i < 8; i += 2) vst1_s8(q + i * 4, vmovn_s16(vcombine_s16(vmovn_s32(n[i]), vmovn_s32(n[i + 1]))));
  const int total = vaddvq_s32(sum);
  *s = {scale.d, scale.d * static_cast<float>(total), total};
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
