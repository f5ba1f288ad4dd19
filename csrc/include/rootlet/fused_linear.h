// Linears that begin with the norm and quantisation of their input, and the gate-up linear that ends with silu * mul and quantisation.
// The same operations on the same numbers as the separate ops: only where a number waits (register, L1, memory) and who meets at which barrier differ.
#pragma once
#include "rootlet/math.h"
#include "rootlet/norm.h"
#include "rootlet/tile_loop.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kGateColumns = kQuantBlock;                 // outputs of one gated unit: a block of the quantised product
constexpr int kUnitGroups = 2 * kGateColumns / kGroupColumns;  // gate, gate, up, up
constexpr int kPanelRows = 32;                            // rows whose sums wait for the activation at once: 8 KB

// Makes a.q and a.scales where the linear starts with a norm, and returns the arguments to go on with. Few rows: each worker makes its own copy (worker 0
// the one that others may read after the op), which is cheaper than meeting. More rows: each its share, then they meet.
RL_INLINE LinearArgs begin_with_norm(const LinearArgs& a, Worker& w) {
  if (!a.norm.x) return a;
  const int rows = a.rows.get(), n = a.norm.n;
  const size_t floats = sizeof(float) * static_cast<size_t>(n), blocks = static_cast<size_t>(n / kQuantBlock);
  if (rows >= kStreamRows || w.num_threads() == 1) {
    const Range r = w.share(rows);
    norm_and_quantize(a.norm, r.begin, r.end, static_cast<float*>(w.scratch(floats)));
    w.barrier();
    return a;
  }
  auto* scratch = static_cast<uint8_t*>(w.scratch(floats + kStreamRows * (static_cast<size_t>(n) + blocks * sizeof(ActScale))));
  LinearArgs mine = a;
  if (w.thread() != 0) {
    mine.norm.out = nullptr;
    mine.norm.scales = reinterpret_cast<ActScale*>(scratch + floats);
    mine.norm.q = reinterpret_cast<int8_t*>(mine.norm.scales + kStreamRows * blocks);
  }
  norm_and_quantize(mine.norm, 0, rows, reinterpret_cast<float*>(scratch));
  mine.q = mine.norm.q;
  mine.scales = mine.norm.scales;
  return mine;
}

template <class Kernel>
void run_quant_linear(const void* p, Worker& w) {
  run_product<Kernel>(begin_with_norm(*static_cast<const LinearArgs*>(p), w), w);
}

// Where a unit's sums wait: [rows of the panel][gate 32, up 32].
struct ToPanel {
  const LinearArgs& a;
  float* panel;
  int first_row, group;
  RL_SHARED void operator()(const float* acc, int row) const {
    const int col = group * kGroupColumns;
    float* to = panel + (row - first_row) * 2 * kGateColumns;
    for (int h = 0; h < kGroupColumns; h += 8) {
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

// Rows [begin, end) of one unit. The first panel asks for the weights of the next unit: `lines` a step, from `ahead` bytes on.
template <class Kernel>
RL_INLINE void run_gated_unit(const GatedArgs& g, const LinearArgs& a, int unit, int begin, int end, size_t ahead, int lines) {
  alignas(64) float panel[kPanelRows * 2 * kGateColumns];
  const size_t bytes = Kernel::group_bytes(a);
  const int half = a.n / 2 / kGroupColumns;
  for (int row = begin; row < end; row += kPanelRows) {
    const int stop = row + kPanelRows < end ? row + kPanelRows : end;
    for (int i = 0; i < kUnitGroups; ++i) {
      const int group = (i < 2 ? 0 : half) + unit * 2 + i % 2;
      const uint8_t* next = a.packed + static_cast<size_t>(group) * bytes + ahead;
      run_rows<Kernel>(a, group, row, stop, {next, row == begin ? lines : 0}, next + bytes,
                       ToPanel{a, panel + (i < 2 ? 0 : kGateColumns) + i % 2 * kGroupColumns, row, group});
    }
    finish_panel(g, panel, unit, row, stop);
  }
}

template <class Kernel>
void run_gated(const void* p, Worker& w) {
  const auto& g = *static_cast<const GatedArgs*>(p);
  const LinearArgs a = begin_with_norm(g.linear, w);
  const int rows = a.rows.get(), steps = Kernel::num_steps(a), units = a.n / 2 / kGateColumns;
  const size_t bytes = Kernel::group_bytes(a), lines = bytes / 64 + 1;
  if (rows < kStreamRows) {
    const Range mine = w.share(units);
    const int a_step = static_cast<int>((bytes / static_cast<size_t>(steps) + 63) / 64);
    for (int u = mine.begin; rows > 0 && u < mine.end; ++u) run_gated_unit<Kernel>(g, a, u, 0, rows, kStreamAhead, a_step);
    return;
  }
  const int total = (rows + kRowBlock - 1) / kRowBlock * units;
  const int wanted = total / (w.num_threads() * 8), chunk = wanted < 1 ? 1 : wanted;
  for (int u = w.take(chunk); u < total; u = w.take(chunk)) {
    for (int i = u; i < total && i < u + chunk; ++i) {
      const int begin = i / units * kRowBlock, end = begin + kRowBlock < rows ? begin + kRowBlock : rows;
      const int tiles = ((end - begin < kPanelRows ? end - begin : kPanelRows) + kTileRows - 1) / kTileRows;
      const int a_tile = (static_cast<int>(lines) + tiles - 1) / tiles;
      run_gated_unit<Kernel>(g, a, i % units, begin, end, 2 * bytes, (a_tile + steps - 1) / steps);
    }
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
