// The quantised tile of instruction sets whose float sums wait in L1: a block of a group at a time, one load and store of the sums each.
#pragma once
#include "rootlet/quant_formats.h"
#include "rootlet/tile_input.h"
#include "rootlet/tile_loop.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kBlockSteps = 1;

// add_block<F, R>(weights of the group, activations, whether a row's block stands out, sums of the group's 16 columns in each row) is the set's own.
template <class F, int R>
__attribute__((noinline)) void quant_tile(const LinearArgs& a, const uint8_t* w, int row, Prefetch pf, float (*acc)[kUnitColumns]) {
  const int blocks = a.k / kQuantBlock;
  TileInput in(a, row);
  unsigned marks = 0;
  for (int i = 0; i < R * kUnitColumns; i += 8) store(acc[0] + i, set1(0.0f));
  for (int b = 0; b < blocks; ++b, in.next()) {
    fetch_part<F::kUnitBytes, 0, kBlockSteps>(pf, w);
    marks = b % kMarked ? marks >> 1 : in.stand_out<R>();
    const bool two_planes = marks & 1;
    for (int g = 0; g < kUnitGroups; ++g, w += F::kBytes) {
      add_block<F, R>(w, in, two_planes, reinterpret_cast<float(*)[kUnitColumns]>(acc[0] + g * kGroupColumns));
    }
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
