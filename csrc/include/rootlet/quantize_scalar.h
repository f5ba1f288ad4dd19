// Activation quantisation as plain loops: the definition.
#pragma once
#include "rootlet/block_scale.h"
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

// One block of 32 values: d = max|x| / 127, q = round(x * 127 / max|x|) to nearest even. A block that holds inf or NaN gets d = NaN, so it is seen.
RL_INLINE void quantize_block(const float* x, int8_t* q, ActScale* s) {
  uint32_t top = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const uint32_t u = bits_of(x[i]) & 0x7fffffffu;  // magnitudes order as integers
    top = u > top ? u : top;
  }
  const BlockScale scale = block_scale(float_of(top));
  int sum = 0;
  for (int i = 0; i < kQuantBlock; ++i) {
    const int v = scale.inverse == 0.0f ? 0 : static_cast<int>(bits_of(x[i] * scale.inverse + 12582912.0f) - 0x4b400000u);
    q[i] = static_cast<int8_t>(v);
    sum += v;
  }
  *s = {scale.d, scale.d * static_cast<float>(sum), sum};
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
