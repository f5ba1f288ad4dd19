// f32x8: eight floats, with one meaning in every instruction set. Kernels are written once over it; the scalar form (plain loops) is the definition,
// and the others agree to the bit, because every operation here is an IEEE operation or an exact bit move. Never write a * b + c: say fma.
#pragma once
#include "rootlet/half.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "rootlet/simd_avx2.h"
#else
#include "rootlet/simd_scalar.h"
#endif

namespace rootlet::ROOTLET_ISA {

// One of the two, with NaN and signed zero treated as the vector forms do: the second operand wins unless the first is strictly greater (less).
RL_INLINE float max1(float a, float b) { return a > b ? a : b; }
RL_INLINE float min1(float a, float b) { return a < b ? a : b; }
RL_INLINE float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Sum of the lanes in one fixed tree: (l, l+4), then (l, l+2), then (l, l+1).
RL_INLINE float hsum(f32x8 x) {
  alignas(32) float l[8];
  store(l, x);
  const float a0 = l[0] + l[4], a1 = l[1] + l[5], a2 = l[2] + l[6], a3 = l[3] + l[7];
  return (a0 + a2) + (a1 + a3);
}

RL_INLINE float hmax(f32x8 x) {
  alignas(32) float l[8];
  store(l, x);
  const float a0 = max1(l[0], l[4]), a1 = max1(l[1], l[5]), a2 = max1(l[2], l[6]), a3 = max1(l[3], l[7]);
  return max1(max1(a0, a2), max1(a1, a3));
}

}  // namespace rootlet::ROOTLET_ISA
