// f32x8: eight floats, with one meaning in every instruction set. Kernels are written once over it; the scalar form (plain loops) is the definition,
// and the others agree to the bit, because every operation here is an IEEE operation or an exact bit move. Never write a * b + c: say fma.
#pragma once
#include "rootlet/half.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "rootlet/simd_avx2.h"
#elif defined(ROOTLET_NEON)
#include "rootlet/simd_neon.h"
#else
#include "rootlet/simd_scalar.h"
#endif

namespace rootlet::ROOTLET_ISA {

// One of the two, with NaN and signed zero treated as the vector forms do: the second operand wins unless the first is strictly greater (less).
RL_INLINE float max1(float a, float b) { return a > b ? a : b; }
RL_INLINE float min1(float a, float b) { return a < b ? a : b; }
RL_INLINE float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

}  // namespace rootlet::ROOTLET_ISA
