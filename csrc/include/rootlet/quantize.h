// Activation quantisation, in a form that any op can end with: int8 per block of 32, for the block-quantised linear that reads the row next.
#pragma once
#if defined(__AVX2__)
#include "rootlet/quantize_avx2.h"
#elif defined(ROOTLET_NEON)
#include "rootlet/quantize_neon.h"
#else
#include "rootlet/quantize_scalar.h"
#endif

namespace rootlet::ROOTLET_ISA {
namespace {

// `n` values (a multiple of 32) from a block border on.
RL_INLINE void quantize_row(const float* x, int n, int8_t* q, ActScale* scales) {
  for (int i = 0; i < n; i += kQuantBlock) quantize_block(x + i, q + i, scales + i / kQuantBlock);
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
