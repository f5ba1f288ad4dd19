// The quantised activations of a tile's rows, at one block.
#pragma once
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

struct TileInput {
  const int8_t* q;    // of the first row; rows are `k` apart
  ptrdiff_t to_low;   // from there to the second plane; 0: there is none. No pointer that moves too: the hot loop is short of registers
  ptrdiff_t k;
  const ActScale* s;  // rows are `blocks` apart
  ptrdiff_t blocks;

  RL_SHARED TileInput(const LinearArgs& a, int row)
      : q(a.q + static_cast<ptrdiff_t>(row) * a.k),
        to_low(a.low ? a.low - a.q : 0),
        k(a.k),
        s(a.scales + static_cast<ptrdiff_t>(row) * (a.k / kQuantBlock)),
        blocks(a.k / kQuantBlock) {}

  RL_SHARED const ActScale& scale(int r) const { return s[r * blocks]; }
  RL_SHARED const int8_t* low() const { return q + to_low; }

  // Bit i: in some row the i-th block from here on, of kMarked, has a second plane. Rows whose block has none hold zeros there and are shifted by
  // nothing, so they keep their bits beside it.
  template <int R>
  RL_SHARED unsigned stand_out() const {
    unsigned bits = 0;
    for (int r = 0; r < R; ++r) bits |= scale(r).stand_out;
    return bits;
  }

  RL_SHARED void next() {
    q += kQuantBlock;
    ++s;
  }
};

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
