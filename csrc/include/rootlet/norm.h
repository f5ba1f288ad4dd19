// RMS norm of one row: x * rsqrt(mean(x^2) + eps) * weight. Shared by the op itself and by linears that begin with it.
// Reduced in 16 lanes (element i in lane i % 16, ascending), then in one fixed tree.
#pragma once
#include <cmath>

#include "rootlet/elementwise.h"
#include "rootlet/quantize.h"
#include "rootlet/simd.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE int smaller(int a, int b) { return a < b ? a : b; }

RL_INLINE float sum_of_squares(const float* x, int n) {
  f32x8 lo = set1(0.0f), hi = set1(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x8 a = load(x + i), b = load(x + i + 8);
    lo = fma(a, a, lo);
    hi = fma(b, b, hi);
  }
  if (i < n) {
    const f32x8 a = load_n(x + i, smaller(n - i, 8));
    lo = fma(a, a, lo);
  }
  if (i + 8 < n) {
    const f32x8 b = load_n(x + i + 8, n - i - 8);
    hi = fma(b, b, hi);
  }
  return hsum(add(lo, hi));
}

RL_INLINE void norm_row(const float* x, const float* weight, int n, float eps, float* out) {
  const float mean = sum_of_squares(x, n) / static_cast<float>(n);
  const f32x8 scale = set1(1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < n; i += 8) {
    const int count = smaller(n - i, 8);
    store_n(out + i, mul(mul(load_n(x + i, count), scale), load_n(weight + i, count)), count);
  }
}

// Rows [begin, end), normalised and quantised. `row` [n] is scratch for rows whose floats nobody wants.
RL_INLINE void norm_and_quantize(const NormArgs& a, int begin, int end, float* row) {
  const int blocks = a.n / kQuantBlock;
  for (int t = begin; t < end; ++t) {
    float* out = a.out ? a.out + static_cast<ptrdiff_t>(t) * a.n : row;
    norm_row(a.x + t * a.x_stride, a.weight, a.n, a.eps, out);
    const ptrdiff_t at = static_cast<ptrdiff_t>(t) * a.n;
    ActScale* scales = a.scales + static_cast<ptrdiff_t>(t) * blocks;
    if (a.low) {
      quantize_row(out, a.n, a.q + at, a.low + at, scales);
    } else {
      quantize_row(out, a.n, a.q + at, scales);
    }
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
