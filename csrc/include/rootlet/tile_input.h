// The quantised activations of a tile's rows, at one block.
#pragma once
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

struct TileInput {
  const int8_t* q;    // of the first row; rows are `k` apart
  const int8_t* low;  // the second plane, or null
  ptrdiff_t k;
  const ActScale* s;  // rows are `blocks` apart
  ptrdiff_t blocks;

  RL_SHARED TileInput(const LinearArgs& a, int row)
      : q(a.q + static_cast<ptrdiff_t>(row) * a.k),
        low(a.low ? a.low + static_cast<ptrdiff_t>(row) * a.k : nullptr),
        k(a.k),
        s(a.scales + static_cast<ptrdiff_t>(row) * (a.k / kQuantBlock)),
        blocks(a.k / kQuantBlock) {}

  RL_SHARED const ActScale& scale(int r) const { return s[r * blocks]; }

  // Some row's block has a second plane. Rows whose block has none hold zeros there and are shifted by nothing, so they keep their bits beside it.
  template <int R>
  RL_SHARED bool stands_out() const {
    if (!low) return false;
    int bits = 0;
    for (int r = 0; r < R; ++r) bits |= scale(r).low_bits;
    return bits != 0;
  }

  RL_SHARED void next() {
    q += kQuantBlock;
    if (low) low += kQuantBlock;
    ++s;
  }
};

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
