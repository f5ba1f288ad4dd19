// The quantised tile as plain loops: the definition. For each output, blocks in ascending order:
//     isum = sum over the block of (w - zero) * q        exact integers
//     acc  = fma(float(isum), d_w * d_a, acc)
//     acc  = fma(m_w, d_a * sum(q), acc)                 formats with a minimum
#pragma once
#include "rootlet/quant_formats.h"
#include "rootlet/tile_loop.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kBlockSteps = 1;

template <class F>
RL_INLINE int packed_value(const uint8_t* w, int k, int c) {
  const int lane = (c / 8) * 32 + (c % 8) * 4 + k % 4;  // byte in a pair of vectors
  const int g = k / 4;
  if (F::kBits == 8) return static_cast<int8_t>(w[g * 64 + lane]);
  const int nibble = (w[g / 2 * 64 + lane] >> (g % 2 * 4)) & 15;
  if (F::kBits == 4) return nibble - F::kZero;
  return (nibble | (((w[F::kHigh + lane] >> g) & 1) << 4)) - F::kZero;
}

// One block of the group at `w`, into acc[R][.. + 16].
template <class F, int R>
RL_INLINE void add_block(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, const ActScale* s, ptrdiff_t s_stride, float* acc) {
  int8_t value[kGroupColumns][kQuantBlock];
  for (int c = 0; c < kGroupColumns; ++c) {
    for (int k = 0; k < kQuantBlock; ++k) value[c][k] = static_cast<int8_t>(packed_value<F>(w, k, c));
  }
  const auto* scales = reinterpret_cast<const uint16_t*>(w + F::kScales);
  const auto* minima = reinterpret_cast<const uint16_t*>(w + F::kMinima);
  for (int r = 0; r < R; ++r, q += q_stride, s += s_stride, acc += kUnitColumns) {
    for (int c = 0; c < kGroupColumns; ++c) {
      int isum = 0;
      for (int k = 0; k < kQuantBlock; ++k) isum += value[c][k] * q[k];
      acc[c] = fma1(static_cast<float>(isum), f16_to_f32(scales[c]) * s->d, acc[c]);
      if (F::kMin) acc[c] = fma1(f16_to_f32(minima[c]), s->d_sum, acc[c]);
    }
  }
}

template <class F, int R>
__attribute__((noinline)) void quant_tile(const LinearArgs& a, const uint8_t* w, int row, Prefetch, float (*acc)[kUnitColumns]) {
  const int blocks = a.k / kQuantBlock;
  const int8_t* q = a.q + static_cast<ptrdiff_t>(row) * a.k;
  const ActScale* s = a.scales + static_cast<ptrdiff_t>(row) * blocks;
  for (int i = 0; i < R * kUnitColumns; ++i) acc[0][i] = 0.0f;
  for (int b = 0; b < blocks; ++b, q += kQuantBlock, ++s) {
    for (int g = 0; g < kUnitGroups; ++g, w += F::kBytes) add_block<F, R>(w, q, a.k, s, blocks, acc[0] + g * kGroupColumns);
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
