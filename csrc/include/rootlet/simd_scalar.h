// f32x8 as plain loops: the definition. `x_n` forms touch only the first min(n, 8) elements; missing lanes read as +0.
#pragma once
#include "rootlet/half.h"

namespace rootlet::ROOTLET_ISA {

struct f32x8 {
  float v[8];
};

#define RL_LANES(expr)                       \
  f32x8 r;                                   \
  for (int i = 0; i < 8; ++i) r.v[i] = expr; \
  return r

RL_INLINE f32x8 set1(float x) { RL_LANES(x); }
RL_INLINE f32x8 load(const float* p) { RL_LANES(p[i]); }
RL_INLINE f32x8 load_n(const float* p, int n) { RL_LANES((i < n ? p[i] : 0.0f)); }
RL_INLINE f32x8 load_f16(const uint16_t* p) { RL_LANES(f16_to_f32(p[i])); }
RL_INLINE f32x8 load_i8(const int8_t* p) {
  f32x8 y;
  for (int i = 0; i < 8; ++i) y.v[i] = static_cast<float>(p[i]);
  return y;
}
RL_INLINE f32x8 load_bf16(const uint16_t* p) { RL_LANES(bf16_to_f32(p[i])); }
RL_INLINE void store(float* p, f32x8 x) {
  for (int i = 0; i < 8; ++i) p[i] = x.v[i];
}
RL_INLINE void store_n(float* p, f32x8 x, int n) {
  for (int i = 0; i < 8 && i < n; ++i) p[i] = x.v[i];
}
RL_INLINE void store_f16(uint16_t* p, f32x8 x) {
  for (int i = 0; i < 8; ++i) p[i] = f32_to_f16(x.v[i]);
}
RL_INLINE f32x8 add(f32x8 a, f32x8 b) { RL_LANES(a.v[i] + b.v[i]); }
RL_INLINE f32x8 sub(f32x8 a, f32x8 b) { RL_LANES(a.v[i] - b.v[i]); }
RL_INLINE f32x8 mul(f32x8 a, f32x8 b) { RL_LANES(a.v[i] * b.v[i]); }
RL_INLINE f32x8 div(f32x8 a, f32x8 b) { RL_LANES(a.v[i] / b.v[i]); }
RL_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { RL_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
RL_INLINE f32x8 max(f32x8 a, f32x8 b) { RL_LANES((a.v[i] > b.v[i] ? a.v[i] : b.v[i])); }
RL_INLINE f32x8 min(f32x8 a, f32x8 b) { RL_LANES((a.v[i] < b.v[i] ? a.v[i] : b.v[i])); }
RL_INLINE f32x8 neg(f32x8 a) { RL_LANES(float_of(bits_of(a.v[i]) ^ 0x80000000u)); }
// where a < b: x, else y (NaN compares false)
RL_INLINE f32x8 select_lt(f32x8 a, f32x8 b, f32x8 x, f32x8 y) { RL_LANES((a.v[i] < b.v[i] ? x.v[i] : y.v[i])); }
// 2^k where t = k + 1.5 * 2^23, k in [-126, 127]
RL_INLINE f32x8 pow2_of_magic(f32x8 t) { RL_LANES(float_of((bits_of(t.v[i]) << 23) + 0x3f800000u)); }

// Sum of the lanes in one fixed tree: (l, l+4), then (l, l+2), then (l, l+1).
RL_INLINE float hsum(f32x8 x) {
  const float *l = x.v, a0 = l[0] + l[4], a1 = l[1] + l[5], a2 = l[2] + l[6], a3 = l[3] + l[7];
  return (a0 + a2) + (a1 + a3);
}

// Largest lane by the same tree; of two the second wins unless the first is strictly greater.
RL_INLINE float hmax(f32x8 x) {
  float m[4];
  for (int i = 0; i < 4; ++i) m[i] = x.v[i] > x.v[i + 4] ? x.v[i] : x.v[i + 4];
  for (int i = 0; i < 2; ++i) m[i] = m[i] > m[i + 2] ? m[i] : m[i + 2];
  return m[0] > m[1] ? m[0] : m[1];
}

#undef RL_LANES

}  // namespace rootlet::ROOTLET_ISA
