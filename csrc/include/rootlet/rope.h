// Rotary embedding of one head. Shared by the op itself and by the op that also stores keys.
#pragma once
#include <cstring>

#include "rootlet/elementwise.h"
#include "rootlet/simd.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE void fill_nan(float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = float_of(0x7fc00000u);
}

RL_INLINE void rotate_halves(const float* x, const float* cos, const float* sin, int half, float* out) {
  for (int i = 0; i < half; i += 8) {
    const int n = half - i < 8 ? half - i : 8;
    const f32x8 a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(out + i, fma(a, c, neg(mul(b, s))), n);
    store_n(out + half + i, fma(b, c, mul(a, s)), n);
  }
}

RL_INLINE void rotate_pairs(const float* x, const float* cos, const float* sin, int half, float* out) {
  for (int i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = fma1(a, cos[i], -(b * sin[i]));
    out[2 * i + 1] = fma1(b, cos[i], a * sin[i]);
  }
}

// Head `u % heads` of token `u / heads`.
RL_INLINE void rotate_head(const RopeArgs& a, int u) {
  const int half = a.rotary_dim / 2, t = u / a.heads, position = a.positions[t];
  const float* x = a.x + t * a.x_stride + u % a.heads * a.head_dim;
  float* out = a.out + static_cast<ptrdiff_t>(u) * a.head_dim;
  if (position < 0 || position >= a.max_len) return fill_nan(out, a.head_dim);
  const float* cos = a.cos_sin + static_cast<ptrdiff_t>(position) * a.rotary_dim;
  if (a.interleaved) {
    rotate_pairs(x, cos, cos + half, half, out);
  } else {
    rotate_halves(x, cos, cos + half, half, out);
  }
  for (int i = a.rotary_dim; i < a.head_dim; ++i) out[i] = x[i];
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
