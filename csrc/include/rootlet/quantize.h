// Activation quantisation, in a form that any op can end with: int8 per block of 32, for the block-quantised linear that reads the row next.
//
// What a norm makes has a few channels far larger than the rest, and each takes the resolution of its whole block. So the input of a linear that follows
// a norm gets a second int8 plane for the blocks that stand out: largest magnitude above kStandsOut times the mean of those of the row. They are about
// one in ten and hold most of the rounding error (docs/decisions/0005-int8-activations.md). The idea of treating outliers apart: LLM.int8() (Dettmers et
// al., 2022), there by columns in float16.
#pragma once
#include <cstring>

#if defined(__AVX2__)
#include "rootlet/quantize_avx2.h"
#elif defined(ROOTLET_NEON)
#include "rootlet/quantize_neon.h"
#else
#include "rootlet/quantize_scalar.h"
#endif

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr float kStandsOut = 2.5f;

// `n` values (a multiple of 32) from a block border on.
RL_INLINE void quantize_row(const float* x, int n, int8_t* q, ActScale* scales) {
  for (int i = 0; i < n; i += kQuantBlock) quantize_block(x + i, block_scale(block_top(x + i)), q + i, scales + i / kQuantBlock);
}

// A whole row, in two planes. A row that holds inf or NaN has no block that stands out.
RL_INLINE void quantize_row(const float* x, int n, int8_t* q, int8_t* low, ActScale* scales) {
  const int blocks = n / kQuantBlock;
  float tops = 0.0f;
  for (int b = 0; b < blocks; ++b) {
    const float top = block_top(x + b * kQuantBlock);
    scales[b].d = top;  // waits here
    tops += top;
  }
  const float limit = kStandsOut * tops / static_cast<float>(blocks);
  for (int b = 0; b < blocks; ++b, x += kQuantBlock, q += kQuantBlock, low += kQuantBlock) {
    const float top = scales[b].d;
    const BlockScale scale = block_scale(top);
    ActScale& s = scales[b];
    quantize_block(x, scale, q, &s);
    if (top > limit) {
      const int low_sum = quantize_rest(x, scale.inverse, low);
      const float d = scale.d / kLowScale;
      s = {d, d * static_cast<float>(s.sum * (1 << kLowBits) + low_sum), s.sum, static_cast<int16_t>(low_sum), kLowBits, s.stand_out};
      scales[b / kMarked * kMarked].stand_out |= static_cast<uint8_t>(1 << b % kMarked);
    } else {
      memset(low, 0, kQuantBlock);
    }
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
