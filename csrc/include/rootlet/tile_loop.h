// How a matrix product is cut: tiles of a few rows x 16 columns, every output in one accumulator from the first k to the last. Tails of fewer rows run
// the same steps in the same order, so a row's bits are the same in any tile. Only the cut between threads changes with the batch:
//   rows < 4   each worker a fixed run of column groups: its weights are one stream, prefetched ahead (memory-bound)
//   rows >= 4  units of (128 rows, 1 group) handed out dynamically; each row tile prefetches its part of the next group's weights (compute-bound)
#pragma once
#include "rootlet/linear.h"
#include "rootlet/simd.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kTileRows = 8;  // twice the registers
#else
constexpr int kTileRows = 4;
#endif
constexpr int kStreamRows = 4;  // from so many rows on, work is handed out dynamically
constexpr int kRowBlock = 128;
constexpr int kStreamAhead = 2048;  // bytes; 5 KB was slower, under 1 KB too late

// Cache lines that a tile asks for while it works: `lines` a block, starting at `next`.
struct Prefetch {
  const uint8_t* next;
  int lines;
};

RL_INLINE void fetch(Prefetch& p) {
  for (int i = 0; i < p.lines; ++i) __builtin_prefetch(p.next + i * 64, 0, 3);
  p.next += p.lines * 64;
}

// out = acc (+ bias) (+ residual) for the first `cols` of 16 columns.
RL_INLINE void finish_row(const LinearArgs& a, const float* acc, int row, int col, int cols) {
  for (int h = 0; h < cols; h += 8) {
    const int n = cols - h < 8 ? cols - h : 8;
    f32x8 y = load(acc + h);
    if (a.bias) y = add(y, load_n(a.bias + col + h, n));
    if (a.residual) y = add(y, load_n(a.residual + row * a.residual_stride + col + h, n));
    store_n(a.out + static_cast<ptrdiff_t>(row) * a.n + col + h, y, n);
  }
}

// Where a group's sums go: into the output.
struct ToOutput {
  const LinearArgs& a;
  int col, cols;
  RL_SHARED ToOutput(const LinearArgs& args, int group)
      : a(args), col(group * kGroupColumns), cols(args.n - col < kGroupColumns ? args.n - col : kGroupColumns) {}
  RL_SHARED void operator()(const float* acc, int row) const { finish_row(a, acc, row, col, cols); }
};

// Kernel::tile<R>(args, group weights, first row, prefetch, acc[R][16]); sink(acc of a row, row).
template <class Kernel, int R, class Sink>
RL_INLINE void run_tile(const LinearArgs& a, int group, int row, Prefetch pf, const Sink& sink) {
  alignas(64) float acc[R][kGroupColumns];
  Kernel::template tile<R>(a, a.packed + static_cast<size_t>(group) * Kernel::group_bytes(a), row, pf, acc);
  for (int r = 0; r < R; ++r) sink(acc[r], row + r);
}

// Rows [row, end): full tiles, then 4, 3, 2 or 1 rows. `next` moves on as each tile prefetches its part, up to `stop`.
template <class Kernel, class Sink>
RL_INLINE void run_rows(const LinearArgs& a, int group, int row, int end, Prefetch pf, const uint8_t* stop, const Sink& sink) {
  const int steps = Kernel::num_steps(a);
  while (row < end) {
    const int left = end - row;
    const int rows = left >= kTileRows ? kTileRows : left >= 4 ? 4 : left;
    if (pf.next >= stop) pf.lines = 0;
    if (rows == kTileRows) run_tile<Kernel, kTileRows>(a, group, row, pf, sink);
    if (kTileRows > 4 && rows == 4) run_tile<Kernel, 4>(a, group, row, pf, sink);
    if (rows == 3) run_tile<Kernel, 3>(a, group, row, pf, sink);
    if (rows == 2) run_tile<Kernel, 2>(a, group, row, pf, sink);
    if (rows == 1) run_tile<Kernel, 1>(a, group, row, pf, sink);
    pf.next += static_cast<ptrdiff_t>(pf.lines) * steps * 64;
    row += rows;
  }
}

template <class Kernel>
RL_INLINE void stream_groups(const LinearArgs& a, int rows, Range groups) {
  const size_t bytes = Kernel::group_bytes(a);
  const int steps = Kernel::num_steps(a);
  const int lines = static_cast<int>((bytes / static_cast<size_t>(steps) + 63) / 64);
  for (int g = groups.begin; g < groups.end; ++g) {
    const uint8_t* ahead = a.packed + static_cast<size_t>(g) * bytes + kStreamAhead;
    run_rows<Kernel>(a, g, 0, rows, {ahead, lines}, ahead + bytes, ToOutput(a, g));
  }
}

template <class Kernel>
RL_INLINE void run_unit(const LinearArgs& a, int group, int begin, int end) {
  const size_t bytes = Kernel::group_bytes(a);
  const int steps = Kernel::num_steps(a);
  const int tiles = (end - begin + kTileRows - 1) / kTileRows;
  const int tile_lines = (static_cast<int>(bytes / 64) + tiles) / tiles;
  const uint8_t* next = a.packed + static_cast<size_t>(group + 1) * bytes;
  run_rows<Kernel>(a, group, begin, end, {next, (tile_lines + steps - 1) / steps}, next + bytes, ToOutput(a, group));
}

template <class Kernel>
RL_INLINE void run_product(const LinearArgs& a, Worker& w) {
  const int rows = a.rows.get();
  const int groups = (a.n + kGroupColumns - 1) / kGroupColumns;
  if (rows < kStreamRows) {
    if (rows > 0) stream_groups<Kernel>(a, rows, w.share(groups));
    return;
  }
  const int units = (rows + kRowBlock - 1) / kRowBlock * groups;
  const int wanted = units / (w.num_threads() * 8);
  const int chunk = wanted < 1 ? 1 : wanted;
  for (int u = w.take(chunk); u < units; u = w.take(chunk)) {
    for (int i = u; i < units && i < u + chunk; ++i) {
      const int begin = i / groups * kRowBlock;
      run_unit<Kernel>(a, i % groups, begin, begin + kRowBlock < rows ? begin + kRowBlock : rows);
    }
  }
}

template <class Kernel>
void run_linear(const void* p, Worker& w) {
  run_product<Kernel>(*static_cast<const LinearArgs*>(p), w);
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
