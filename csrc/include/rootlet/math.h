// exp over lanes and one float, silu: the same bits in all and in every instruction set. Softmax and activations use only these.
//
// exp(x) = 2^k * e^r, k = round(x / ln 2), |r| <= ln(2)/2; e^r = 1 + r + r^2 P(r), P of degree 4 fitted on Chebyshev nodes (error 0.2 ulp before
// rounding). Below -87.33 the result is exactly 0 (a masked score must leave no trace); above 88.37 it stays at exp(88.37). NaN stays NaN.
#pragma once
#include "rootlet/simd16.h"

namespace rootlet::ROOTLET_ISA {

inline constexpr float kExpLow = -87.33f;
inline constexpr float kExpHigh = 88.37f;
inline constexpr float kLog2E = 0x1.715476p+0f;
inline constexpr float kLn2High = 0x1.62e400p-1f;  // 15 bits: k * kLn2High is exact
inline constexpr float kLn2Low = 0x1.7f7d1cp-20f;
inline constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23

// k * -kLn2High rather than -k * kLn2High: the same product, one operation less.
template <class V>
RL_INLINE V exp_lanes(V x) {
  const V low = splat<V>(kExpLow), magic = splat<V>(kRoundMagic);
  const V c = max(low, min(splat<V>(kExpHigh), x));  // x is the second operand: NaN passes
  const V t = fma(c, splat<V>(kLog2E), magic);
  const V k = sub(t, magic);
  V r = fma(k, splat<V>(-kLn2High), c);
  r = fma(k, splat<V>(-kLn2Low), r);
  V p = splat<V>(0x1.6d43b4p-10f);
  p = fma(p, r, splat<V>(0x1.120be8p-7f));
  p = fma(p, r, splat<V>(0x1.5554e8p-5f));
  p = fma(p, r, splat<V>(0x1.5554dcp-3f));
  p = fma(p, r, splat<V>(0.5f));
  const V e = add(splat<V>(1.0f), fma(mul(r, r), p, r));
  return select_lt(x, low, splat<V>(0.0f), mul(e, pow2_of_magic(t)));
}

RL_INLINE f32x8 exp8(f32x8 x) { return exp_lanes(x); }

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
