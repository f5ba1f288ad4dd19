// f32x8 on NEON (AArch64): two registers of four. Meanings: simd_scalar.h. Maxima and minima are compare and select, because vmaxq passes any NaN on.
#pragma once
#include <arm_neon.h>

#include "rootlet/half.h"

namespace rootlet::ROOTLET_ISA {

struct f32x8 {
  float32x4_t a, b;
};

RL_INLINE f32x8 set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
RL_INLINE f32x8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
RL_INLINE f32x8 load_n(const float* p, int n) {
  if (n >= 8) return load(p);
  float x[8] = {};
  for (int i = 0; i < n; ++i) x[i] = p[i];
  return load(x);
}
RL_INLINE f32x8 load_f16(const uint16_t* p) {
  const uint16x8_t h = vld1q_u16(p);
  return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(h))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(h)))};
}
RL_INLINE f32x8 load_i8(const int8_t* p) {
  const int16x8_t n = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(n))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(n)))};
}
RL_INLINE f32x8 load_bf16(const uint16_t* p) {
  const uint16x8_t h = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)), vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
}
RL_INLINE void store(float* p, f32x8 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}
RL_INLINE void store_n(float* p, f32x8 x, int n) {
  if (n >= 8) return store(p, x);
  float y[8];
  store(y, x);
  for (int i = 0; i < n; ++i) p[i] = y[i];
}
RL_INLINE void store_f16(uint16_t* p, f32x8 x) {
  vst1q_u16(p, vcombine_u16(vreinterpret_u16_f16(vcvt_f16_f32(x.a)), vreinterpret_u16_f16(vcvt_f16_f32(x.b))));
}
RL_INLINE f32x8 add(f32x8 a, f32x8 b) { return {vaddq_f32(a.a, b.a), vaddq_f32(a.b, b.b)}; }
RL_INLINE f32x8 sub(f32x8 a, f32x8 b) { return {vsubq_f32(a.a, b.a), vsubq_f32(a.b, b.b)}; }
RL_INLINE f32x8 mul(f32x8 a, f32x8 b) { return {vmulq_f32(a.a, b.a), vmulq_f32(a.b, b.b)}; }
RL_INLINE f32x8 div(f32x8 a, f32x8 b) { return {vdivq_f32(a.a, b.a), vdivq_f32(a.b, b.b)}; }
RL_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return {vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b)}; }
RL_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
RL_INLINE float32x4_t lesser(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
RL_INLINE f32x8 max(f32x8 a, f32x8 b) { return {larger(a.a, b.a), larger(a.b, b.b)}; }
RL_INLINE f32x8 min(f32x8 a, f32x8 b) { return {lesser(a.a, b.a), lesser(a.b, b.b)}; }
RL_INLINE f32x8 neg(f32x8 a) { return {vnegq_f32(a.a), vnegq_f32(a.b)}; }
RL_INLINE f32x8 select_lt(f32x8 a, f32x8 b, f32x8 x, f32x8 y) {
  return {vbslq_f32(vcltq_f32(a.a, b.a), x.a, y.a), vbslq_f32(vcltq_f32(a.b, b.b), x.b, y.b)};
}
RL_INLINE float32x4_t pow2_of_magic(float32x4_t t) {
  return vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23), vdupq_n_u32(0x3f800000u)));
}
RL_INLINE f32x8 pow2_of_magic(f32x8 t) { return {pow2_of_magic(t.a), pow2_of_magic(t.b)}; }

RL_INLINE float hsum(f32x8 x) {
  const float32x4_t four = vaddq_f32(x.a, x.b);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
RL_INLINE float hmax(f32x8 x) {
  float m[4];
  vst1q_f32(m, larger(x.a, x.b));
  for (int i = 0; i < 2; ++i) m[i] = m[i] > m[i + 2] ? m[i] : m[i + 2];
  return m[0] > m[1] ? m[0] : m[1];
}

}  // namespace rootlet::ROOTLET_ISA
