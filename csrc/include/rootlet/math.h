// exp and silu over f32x8 and one float, the same bits in both and in every instruction set. Softmax and activations use only these.
//
// exp(x) = 2^k * e^r, k = round(x / ln 2), |r| <= ln(2)/2; e^r = 1 + r + r^2 P(r), P of degree 4 fitted on Chebyshev nodes (error 0.2 ulp before
// rounding). Below -87.33 the result is exactly 0 (a masked score must leave no trace); above 88.37 it stays at exp(88.37). NaN stays NaN.
#pragma once
#include "rootlet/simd.h"

namespace rootlet::ROOTLET_ISA {

inline constexpr float kExpLow = -87.33f;
inline constexpr float kExpHigh = 88.37f;
inline constexpr float kLog2E = 0x1.715476p+0f;
inline constexpr float kLn2High = 0x1.62e400p-1f;  // 15 bits: k * kLn2High is exact
inline constexpr float kLn2Low = 0x1.7f7d1cp-20f;
inline constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23

RL_INLINE f32x8 exp8(f32x8 x) {
  const f32x8 c = max(set1(kExpLow), min(set1(kExpHigh), x));  // x is the second operand: NaN passes
  const f32x8 t = fma(c, set1(kLog2E), set1(kRoundMagic));
  const f32x8 k = sub(t, set1(kRoundMagic));
  f32x8 r = fma(neg(k), set1(kLn2High), c);
  r = fma(neg(k), set1(kLn2Low), r);
  f32x8 p = set1(0x1.6d43b4p-10f);
  p = fma(p, r, set1(0x1.120be8p-7f));
  p = fma(p, r, set1(0x1.5554e8p-5f));
  p = fma(p, r, set1(0x1.5554dcp-3f));
  p = fma(p, r, set1(0.5f));
  const f32x8 e = add(set1(1.0f), fma(mul(r, r), p, r));
  return select_lt(x, set1(kExpLow), set1(0.0f), mul(e, pow2_of_magic(t)));
}

RL_INLINE float exp1(float x) {
  const float c = max1(kExpLow, min1(kExpHigh, x));
  const float t = fma1(c, kLog2E, kRoundMagic);
  const float k = t - kRoundMagic;
  float r = fma1(-k, kLn2High, c);
  r = fma1(-k, kLn2Low, r);
  float p = 0x1.6d43b4p-10f;
  p = fma1(p, r, 0x1.120be8p-7f);
  p = fma1(p, r, 0x1.5554e8p-5f);
  p = fma1(p, r, 0x1.5554dcp-3f);
  p = fma1(p, r, 0.5f);
  const float e = 1.0f + fma1(r * r, p, r);
  return x < kExpLow ? 0.0f : e * float_of((bits_of(t) << 23) + 0x3f800000u);
}

// x / (1 + exp(-x))
RL_INLINE f32x8 silu8(f32x8 x) { return div(x, add(set1(1.0f), exp8(neg(x)))); }

}  // namespace rootlet::ROOTLET_ISA
