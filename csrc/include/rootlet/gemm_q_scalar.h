// The quantised tile as plain loops: the definition. For each output, blocks in ascending order:
//     isum = sum over the block of (w - zero) * q        exact integers
//     isum = (isum << low_bits) + sum of (w - zero) * low  blocks with a second plane; still exact: below 2^26
//     acc  = fma(float(isum), d_w * d_a, acc)
//     acc  = fma(m_w, d_a * sum, acc)                    formats with a minimum; sum of q, or of (q << low_bits) + low
#pragma once
#include "rootlet/quant_formats.h"
#include "rootlet/simd.h"
#include "rootlet/tile_input.h"

namespace rootlet::ROOTLET_ISA {
namespace {

template <class F>
RL_INLINE int packed_value(const uint8_t* w, int k, int c) {
  const int lane = (c / 8) * 32 + (c % 8) * 4 + k % 4;  // byte in a pair of vectors
  const int g = k / 4;
  if (F::kBits == 8) return static_cast<int8_t>(w[g * 64 + lane]);
  const int nibble = (w[g / 2 * 64 + lane] >> (g % 2 * 4)) & 15;
  if (F::kBits == 4) return nibble - F::kZero;
  return (nibble | (((w[F::kHigh + lane] >> g) & 1) << 4)) - F::kZero;
}

RL_INLINE int dot(const int8_t* w, const int8_t* q) {
  int sum = 0;
  for (int k = 0; k < kQuantBlock; ++k) sum += w[k] * q[k];
  return sum;
}

// One block of the group at `w`, into the sums of its 16 columns.
template <class F, int R>
RL_INLINE void add_block(const uint8_t* w, const TileInput& in, bool, float (*acc)[kUnitColumns]) {
  int8_t value[kGroupColumns][kQuantBlock];
  for (int c = 0; c < kGroupColumns; ++c) {
    for (int k = 0; k < kQuantBlock; ++k) value[c][k] = static_cast<int8_t>(packed_value<F>(w, k, c));
  }
  const auto* scales = reinterpret_cast<const uint16_t*>(w + F::kScales);
  const auto* minima = reinterpret_cast<const uint16_t*>(w + F::kMinima);
  for (int r = 0; r < R; ++r) {
    const ActScale& s = in.scale(r);
    for (int c = 0; c < kGroupColumns; ++c) {
      int isum = dot(value[c], in.q + r * in.k);
      if (s.low_bits) isum = isum * (1 << s.low_bits) + dot(value[c], in.low() + r * in.k);
      acc[r][c] = fma1(static_cast<float>(isum), f16_to_f32(scales[c]) * s.d, acc[r][c]);
      if (F::kMin) acc[r][c] = fma1(f16_to_f32(minima[c]), s.d_sum, acc[r][c]);
    }
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
