// Linears that begin with the norm and quantisation of their input, and the gate-up linear that ends with silu * mul and quantisation.
// The same operations on the same numbers as the separate ops: only where a number waits (register, L1, memory) and who meets at which barrier differ.
#pragma once
#include "rootlet/math.h"
#include "rootlet/norm.h"
#include "rootlet/tile_loop.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kGateColumns = kQuantBlock;                 // outputs of one gated unit: a block of the quantised product
constexpr int kCopyRows = 4;                             // below so many rows each worker normalises all of them
constexpr int kPanelRows = 32;                            // rows whose sums wait for the activation at once: 8 KB

// Makes a.q, a.low and a.scales where the linear starts with a norm, and returns the arguments to go on with. Few rows: each worker makes its own copy (worker 0
// the one that others may read after the op), which is cheaper than meeting. More rows: each its share, then they meet.
RL_INLINE LinearArgs begin_with_norm(const LinearArgs& a, Worker& w) {
  if (!a.norm.x) return a;
  const int rows = a.rows.get(), n = a.norm.n;
  const size_t floats = sizeof(float) * static_cast<size_t>(n), blocks = static_cast<size_t>(n / kQuantBlock);
  if (rows >= kCopyRows || w.num_threads() == 1) {
    const Range r = w.share(rows);
    norm_and_quantize(a.norm, r.begin, r.end, static_cast<float*>(w.scratch(floats)));
    w.barrier();
    return a;
  }
  auto* scratch = static_cast<uint8_t*>(w.scratch(floats + kCopyRows * (2 * static_cast<size_t>(n) + blocks * sizeof(ActScale))));
  LinearArgs mine = a;
  if (w.thread() != 0) {
    mine.norm.out = nullptr;
    mine.norm.scales = reinterpret_cast<ActScale*>(scratch + floats);
    mine.norm.q = reinterpret_cast<int8_t*>(mine.norm.scales + kCopyRows * blocks);
    if (a.norm.low) mine.norm.low = mine.norm.q + kCopyRows * static_cast<ptrdiff_t>(n);
  }
  norm_and_quantize(mine.norm, 0, rows, reinterpret_cast<float*>(scratch));
  mine.q = mine.norm.q;
  mine.low = mine.norm.low;
  mine.scales = mine.norm.scales;
  return mine;
}

template <class Kernel>
void run_quant_linear(const void* p, Worker& w) {
  run_product<Kernel>(begin_with_norm(*static_cast<const LinearArgs*>(p), w), w);
}

// Where the sums of a unit's half wait: [rows of the panel][gate 32, up 32].
struct ToPanel {
  const LinearArgs& a;
  float* panel;
  int first_row, col;
  RL_SHARED void operator()(const float* acc, int row) const {
    float* to = panel + (row - first_row) * 2 * kGateColumns;
    for (int h = 0; h < kGateColumns; h += 8) {
      f32x8 y = load(acc + h);
      if (a.bias) y = add(y, load(a.bias + col + h));
      store(to + h, y);
      if (a.out) store(a.out + static_cast<ptrdiff_t>(row) * a.n + col + h, y);
    }
  }
};

// Columns [unit * 32, + 32) of the product for the panel's rows.
RL_INLINE void finish_panel(const GatedArgs& g, const float* panel, int unit, int begin, int end) {
  const int inner = g.linear.n / 2;
  for (int t = begin; t < end; ++t, panel += 2 * kGateColumns) {
    const ptrdiff_t at = static_cast<ptrdiff_t>(t) * inner + unit * kGateColumns;
    float product[kGateColumns];
    float* out = g.out ? g.out + at : product;
    for (int i = 0; i < kGateColumns; i += 8) store(out + i, mul(silu8(load(panel + i)), load(panel + kGateColumns + i)));
    quantize_row(out, kGateColumns, g.q + at, g.scales + at / kQuantBlock);
  }
}

// Rows [begin, end) of one unit. The first panel asks for the weights of the next unit, where it is this worker's (`go_on`).
template <class Kernel>
RL_INLINE void run_gated_unit(const GatedArgs& g, const LinearArgs& a, int unit, int begin, int end, bool go_on) {
  alignas(64) float panel[kPanelRows * 2 * kGateColumns];
  const int half = a.n / 2 / kGateColumns;
  static_assert(Kernel::kColumns == kGateColumns);
  for (int row = begin; row < end; row += kPanelRows) {
    const int stop = row + kPanelRows < end ? row + kPanelRows : end;
    for (int i = 0; i < 2; ++i) {
      const int from = unit + i * half;
      run_rows<Kernel>(a, from, row, stop, go_on && row == begin, ToPanel{a, panel + i * kGateColumns, row, from * kGateColumns});
    }
    finish_panel(g, panel, unit, row, stop);
  }
}

template <class Kernel>
void run_gated(const void* p, Worker& w) {
  const auto& g = *static_cast<const GatedArgs*>(p);
  const LinearArgs a = begin_with_norm(g.linear, w);
  const int rows = a.rows.get(), units = a.n / 2 / kGateColumns;
  const int all = (rows + kRowBlock - 1) / kRowBlock * units;
  const int mine = w.share(all).end;
  for (int i = w.take_near(all); i < all; i = w.take_near(all)) {
    const int unit = i % units, begin = i / units * kRowBlock;
    run_gated_unit<Kernel>(g, a, unit, begin, begin + kRowBlock < rows ? begin + kRowBlock : rows, i + 1 < mine && unit + 1 < units);
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
