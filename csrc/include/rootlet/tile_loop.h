// How a matrix product is cut: tiles of a few rows x one unit of columns, every output in one accumulator from the first k to the last. Fewer rows run
// the same steps in the same order, so a row's bits are the same in any tile. Between threads the columns are cut: each worker goes through its own run
// of units, which is one stream of weights, and helps the others when it is done. While a tile works it asks for its part of the next unit's weights.
#pragma once
#include "rootlet/linear.h"
#include "rootlet/simd.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kTileRows = 6;  // twice the registers
#else
constexpr int kTileRows = 4;
#endif
constexpr int kRowBlock = 128;
constexpr int kStreamAhead = 4096;  // bytes; 2 KB is as good at 1 row and 8 % slower at 4, 8 KB is slower at 1

// What a tile asks for while it works: `lines` cache lines a step from `next` on, or (`near`: it is the only tile of its unit) what lies kStreamAhead
// past the weights that it reads, which needs no count and no pointer.
struct Prefetch {
  const uint8_t* next;
  int lines;
  bool near;
};

RL_INLINE void fetch(Prefetch& p) {
  for (int i = 0; i < p.lines; ++i) __builtin_prefetch(p.next + i * 64, 0, 3);
  p.next += p.lines * 64;
}

// Part kPart of the kParts steps that one block of kBytes at `w` is worth.
template <int kBytes, int kPart, int kParts>
RL_INLINE void fetch_part(Prefetch& p, const uint8_t* w) {
  constexpr int kLines = (kBytes + 63) / 64, kFirst = kLines * kPart / kParts, kLast = kLines * (kPart + 1) / kParts;
  if (p.near) {
#pragma GCC unroll 32
    for (int i = kFirst; i < kLast; ++i) __builtin_prefetch(w + kStreamAhead + i * 64, 0, 3);
  } else {
    fetch(p);
  }
}

// out = acc (+ bias) (+ residual) for the first `cols` columns of a unit.
RL_INLINE void finish_row(const LinearArgs& a, const float* acc, int row, int col, int cols) {
  for (int h = 0; h < cols; h += 8) {
    const int n = cols - h < 8 ? cols - h : 8;
    f32x8 y = load(acc + h);
    if (a.bias) y = add(y, load_n(a.bias + col + h, n));
    if (a.residual) y = add(y, load_n(a.residual + row * a.residual_stride + col + h, n));
    store_n(a.out + static_cast<ptrdiff_t>(row) * a.n + col + h, y, n);
  }
}

// Where a unit's sums go: into the output.
struct ToOutput {
  const LinearArgs& a;
  int col, cols;
  RL_SHARED ToOutput(const LinearArgs& args, int first_col, int unit_cols)
      : a(args), col(first_col), cols(args.n - col < unit_cols ? args.n - col : unit_cols) {}
  RL_SHARED void operator()(const float* acc, int row) const { finish_row(a, acc, row, col, cols); }
};

// Kernel::tile<R>(args, weights of the unit, first row, prefetch, acc[R][kColumns]); sink(acc of a row, row).
template <class Kernel, int R, class Sink>
RL_INLINE void run_tile(const LinearArgs& a, const uint8_t* w, int row, Prefetch pf, const Sink& sink) {
  alignas(64) float acc[R][Kernel::kColumns];
  Kernel::template tile<R>(a, w, row, pf, acc);
  for (int r = 0; r < R; ++r) sink(acc[r], row + r);
}

// One unit of columns, rows [row, end) in tiles of almost equal height. `go_on`: the next unit is wanted after it, so each tile asks for its part of the
// stream, so far ahead that the first tile of each unit finds all of its weights at hand.
template <class Kernel, class Sink>
RL_INLINE void run_rows(const LinearArgs& a, int unit, int row, int end, bool go_on, const Sink& sink) {
  const size_t bytes = unit_bytes(Kernel::kKind, a.k);
  const uint8_t* w = a.packed + static_cast<size_t>(unit) * bytes;
  const int steps = Kernel::num_steps(a), lines = static_cast<int>((bytes + 63) / 64);
  int tiles = (end - row + kTileRows - 1) / kTileRows;
  Prefetch pf{w + bytes - bytes / static_cast<size_t>(tiles) + kStreamAhead, (lines + tiles * steps - 1) / (tiles * steps), tiles == 1};
  const uint8_t* stop = go_on ? pf.next + bytes : w + bytes;
  for (; tiles > 0; --tiles) {
    const int rows = (end - row + tiles - 1) / tiles;
    if (pf.next >= stop) pf.lines = 0;
    if (kTileRows == 6 && rows == 6) run_tile<Kernel, kTileRows>(a, w, row, pf, sink);
    if (kTileRows == 6 && rows == 5) run_tile<Kernel, kTileRows - 1>(a, w, row, pf, sink);
    if (rows == 4) run_tile<Kernel, 4>(a, w, row, pf, sink);
    if (rows == 3) run_tile<Kernel, 3>(a, w, row, pf, sink);
    if (rows == 2) run_tile<Kernel, 2>(a, w, row, pf, sink);
    if (rows == 1) run_tile<Kernel, 1>(a, w, row, pf, sink);
    pf.next += static_cast<ptrdiff_t>(pf.lines) * steps * 64;
    row += rows;
  }
}

template <class Kernel>
RL_INLINE void run_product(const LinearArgs& a, Worker& w) {
  const int rows = a.rows.get(), units = num_units(Kernel::kKind, a.n);
  const int all = (rows + kRowBlock - 1) / kRowBlock * units, mine = w.share(all).end;
  for (int i = w.take_near(all); i < all; i = w.take_near(all)) {
    const int unit = i % units, begin = i / units * kRowBlock;
    run_rows<Kernel>(a, unit, begin, begin + kRowBlock < rows ? begin + kRowBlock : rows, i + 1 < mine && unit + 1 < units,
                     ToOutput(a, unit * Kernel::kColumns, Kernel::kColumns));
  }
}

template <class Kernel>
void run_linear(const void* p, Worker& w) {
  run_product<Kernel>(*static_cast<const LinearArgs*>(p), w);
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
