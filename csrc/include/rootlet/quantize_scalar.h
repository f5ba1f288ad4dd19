// Activation quantisation as plain loops: the definition.
#pragma once
#include "rootlet/block_scale.h"
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

// The largest magnitude of 32 values; inf or NaN when one of them is.
RL_INLINE float block_top(const float* x) {
  uint32_t top = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const uint32_t u = bits_of(x[i]) & 0x7fffffffu;  // magnitudes order as integers
    top = u > top ? u : top;
  }
  return float_of(top);
}

RL_INLINE int nearest(float x) { return static_cast<int>(bits_of(x + 12582912.0f) - 0x4b400000u); }

// q = round(x / d) to nearest even. A block that holds inf or NaN has d = NaN, so it is seen.
RL_INLINE void quantize_block(const float* x, BlockScale scale, int8_t* q, ActScale* s) {
  int sum = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const int v = scale.inverse == 0.0f ? 0 : nearest(x[i] * scale.inverse);
    q[i] = static_cast<int8_t>(v);
    sum += v;
  }
  *s = {scale.d, scale.d * static_cast<float>(sum), sum, 0, 0, 0};
}

// The second plane: what rounding left of x / d, in steps of 1 / 2^kLowBits. Returns its sum.
RL_INLINE int quantize_rest(const float* x, float inverse, int8_t* low) {
  int sum = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const float y = x[i] * inverse;
    const int v = inverse == 0.0f ? 0 : nearest((y - static_cast<float>(nearest(y))) * kLowScale);
    low[i] = static_cast<int8_t>(v);
    sum += v;
  }
  return sum;
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
