// The tile of attention: up to 6 rows against one cut of 128 keys. Included by attention.cpp only, once for each instruction set; the order of
// operations that fixes a row's bits is described there.
#pragma once
#include "rootlet/attention.h"
#include "rootlet/math.h"
#include "rootlet/simd16.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kTileRows = 6;
constexpr int kGroupRows = 48;  // rows whose running state is kept at once
constexpr int kBlocks = kCut / kKeyBlock;
constexpr int kSplitItems = 4;  // up to so many items a worker are worth splitting by cuts

RL_INLINE float widen(float x) { return x; }
RL_INLINE float widen(uint16_t x) { return f16_to_f32(x); }
RL_INLINE float widen(int8_t x) { return static_cast<float>(x); }
RL_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
RL_INLINE int least(int a, int b) { return a < b ? a : b; }
RL_INLINE int most(int a, int b) { return a > b ? a : b; }

// What a worker keeps for up to kGroupRows rows of one item.
struct RowState {
  float* q;    // [rows, dim], scaled
  float* out;  // [rows, dim], running
  float best[kGroupRows];
  float total[kGroupRows];
  int low[kGroupRows];   // first and
  int high[kGroupRows];  // last + 1 visible position
};

// One cut of 128 keys: the base of each 16-key block.
template <class T>
struct Cut {
  int begin;
  const T* k[kBlocks];
  const T* v[kBlocks];
  const float* k_scale[kBlocks];  // int8 only: of the block's 16 keys
  const float* v_scale[kBlocks];
};

// Blocks of keys or values that are wanted soon: fetched line by line beside the arithmetic, since streams of 1 or 2 KB are too short for the hardware.
template <class T>
struct Wanted {
  const T* const* blocks;  // [kBlocks], null = nothing
  const float* const* scales;
};

// Under the scores: values of this cut. Under the sums of values: keys of the next.
template <class T>
struct Soon {
  Wanted<T> values, keys;
};

// Fetches what the loop over blocks [first, last) does not come by, and the scales.
template <class T>
RL_INLINE void prefetch_rest(const Wanted<T>& soon, int dim, int first, int last) {
  if (!soon.blocks) return;
  for (int b = 0; b < kBlocks; ++b) {
    if (b > 0 && soon.blocks[b] == soon.blocks[b - 1]) continue;
    if constexpr (kScaled<T>) prefetch(soon.scales[b]);
    if (b >= first && b < last) continue;
    for (int i = 0; i < dim * kKeyBlock; i += 64 / static_cast<int>(sizeof(T))) prefetch(soon.blocks[b] + i);
  }
}

// Scores of R rows against N key blocks; `s` is [R, kCut] at the first block.
template <int R, int N, class T>
RL_INLINE void score_blocks(const float* q, int dim, const T* const* k, const T* const* soon, const float* const* k_scale, float* s) {
  f32x16 acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) set(acc[r][n], 0.0f);
  }
  for (int d = 0; d < dim; ++d) {
    f32x16 key[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) get(key[n], k[n] + d * kKeyBlock);
    if (soon && d * kKeyBlock * static_cast<int>(sizeof(T)) % 64 == 0) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) prefetch(soon[n] + d * kKeyBlock);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      f32x16 x;
      set(x, q[r * dim + d]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = fma(x, key[n], acc[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      if constexpr (kScaled<T>) {
        f32x16 scale;
        get(scale, k_scale[n]);
        acc[r][n] = mul(acc[r][n], scale);
      }
      put(s + r * kCut + n * kKeyBlock, acc[r][n]);
    }
  }
}

// Vectors side by side that keep R rows within the registers.
template <int R>
constexpr int kWide = kTileVectors / R >= 4 ? 4 : kTileVectors / R >= 2 ? 2 : 1;

template <int R, class T>
RL_INLINE void score_tile(const float* q, int dim, const Cut<T>& cut, const T* const* soon, int first, int last, float* s) {
  constexpr int N = kWide<R>;
  int b = first;
  for (; b + N <= last; b += N) score_blocks<R, N>(q, dim, cut.k + b, soon ? soon + b : nullptr, cut.k_scale + b, s + b * kKeyBlock);
  for (; b < last; ++b) score_blocks<R, 1>(q, dim, cut.k + b, soon ? soon + b : nullptr, cut.k_scale + b, s + b * kKeyBlock);
}

// How a tile's rows fold a cut into their running output.
struct Merge {
  alignas(32) float keep[8];
  alignas(32) float gain[8];
  bool live[kTileRows];
};

// Keys [low, high) of the cut that each row of a tile sees, and blocks [first, last) that hold all of them.
template <int R>
struct Seen {
  int low[R], high[R];
  int lowest, highest, first, last;
};

template <int R>
RL_INLINE Seen<R> seen_keys(const RowState& st, int r0, int begin) {
  Seen<R> seen;
  seen.lowest = kCut, seen.highest = 0;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    seen.low[r] = most(st.low[r0 + r] - begin, 0);
    seen.high[r] = least(st.high[r0 + r] - begin, kCut);
    if (seen.low[r] >= seen.high[r]) continue;
    seen.lowest = least(seen.lowest, seen.low[r]);
    seen.highest = most(seen.highest, seen.high[r]);
  }
  seen.first = seen.lowest / kKeyBlock, seen.last = (seen.highest + kKeyBlock - 1) / kKeyBlock;
  return seen;
}

// Masks one row of scores to the keys it sees and returns the largest. Blocks [first, last) are written whole.
RL_INLINE float mask_row(float* s, int first, int last, int low, int high) {
  for (int j = first * kKeyBlock; j < low; ++j) s[j] = -__builtin_inff();
  for (int j = high; j < last * kKeyBlock; ++j) s[j] = -__builtin_inff();
  f32x16 top = splat<f32x16>(-__builtin_inff());
  for (int j = first * kKeyBlock; j < last * kKeyBlock; j += kKeyBlock) top = max(top, read<f32x16>(s + j));
  return hmax(top);
}

// Scores to weights; returns their sum.
RL_INLINE float weigh_row(float* s, int first, int last, float top) {
  const f32x16 shift = splat<f32x16>(top);
  f32x16 sum = splat<f32x16>(0.0f);
  for (int j = first * kKeyBlock; j < last * kKeyBlock; j += kKeyBlock) {
    const f32x16 w = exp_lanes(sub(read<f32x16>(s + j), shift));
    put(s + j, w);
    sum = add(sum, w);
  }
  return hsum(sum);
}

// Turns the scores of a tile into weights and moves its rows' (max, sum) on. Rows that see nothing of the cut get weights 0 and stay as they are.
template <int R>
RL_INLINE void weigh_tile(RowState& st, int r0, const Seen<R>& seen, float* s, Merge& m) {
  alignas(32) float best[8] = {}, old[8] = {}, top[8] = {};
  for (int r = 0; r < R; ++r) {
    old[r] = top[r] = best[r] = st.best[r0 + r];
    m.live[r] = seen.low[r] < seen.high[r];
    if (!m.live[r]) continue;
    best[r] = mask_row(s + r * kCut, seen.first, seen.last, seen.low[r], seen.high[r]);
    top[r] = old[r] > best[r] ? old[r] : best[r];
  }
  store(m.keep, exp8(sub(load(old), load(top))));
  store(m.gain, exp8(sub(load(best), load(top))));
  for (int r = 0; r < R; ++r) {
    if (!m.live[r]) {
      for (int j = seen.first * kKeyBlock; j < seen.last * kKeyBlock; ++j) s[r * kCut + j] = 0.0f;
      continue;
    }
    const float total = weigh_row(s + r * kCut, seen.first, seen.last, best[r]);
    st.best[r0 + r] = top[r];
    st.total[r0 + r] = fma1(st.total[r0 + r], m.keep[r], total * m.gain[r]);
  }
}

// The scales of int8 values go into the weights, after the sum was taken. Masked weights stay 0 whatever the scale.
template <class T>
RL_INLINE void scale_weights(float* s, const Cut<T>& cut, int low, int high) {
  for (int b = low / kKeyBlock; b * kKeyBlock < high; ++b) {
    float* w = s + b * kKeyBlock;
    const int begin = most(low - b * kKeyBlock, 0), end = least(high - b * kKeyBlock, kKeyBlock);
    if (end - begin == kKeyBlock) {
      put(w, mul(read<f32x16>(w), read<f32x16>(cut.v_scale[b])));
      continue;
    }
    for (int j = begin; j < end; ++j) w[j] *= cut.v_scale[b][j];
  }
}

// acc = weights x values over keys [low, high) of the cut, for N vectors of dimensions from `d0`.
template <class V, int R, int N, class T>
RL_INLINE void value_tile(const float* w, int dim, const Cut<T>& cut, int low, int high, int d0, const T* const* soon, V (*acc)[N]) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) set(acc[r][n], 0.0f);
  }
  for (int b = low / kKeyBlock; b * kKeyBlock < high; ++b) {
    const T* v = cut.v[b] + d0;
    const T* next = soon ? soon[b] + d0 : nullptr;
    const int end = least(high - b * kKeyBlock, kKeyBlock);
    for (int j = most(low - b * kKeyBlock, 0); j < end; ++j) {
      if (next) {
#pragma GCC unroll 8
        for (int n = 0; n < N * kLanes; n += 64 / static_cast<int>(sizeof(T))) prefetch(next + j * dim + n);
      }
      V value[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) get(value[n], v + j * dim + kLanes * n);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        V x;
        set(x, w[r * kCut + b * kKeyBlock + j]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[r][n] = fma(x, value[n], acc[r][n]);
      }
    }
  }
}

template <class V, int R, int N, class T>
RL_INLINE void merge_values(const float* w, int dim, const Cut<T>& cut, int low, int high, int d0, const T* const* soon, const Merge& m, float* out) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  V acc[R][N];
  value_tile<V, R, N>(w, dim, cut, low, high, d0, soon, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (!m.live[r]) continue;
    V keep, gain;
    set(keep, m.keep[r]);
    set(gain, m.gain[r]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* to = out + r * dim + d0 + kLanes * n;
      V old;
      get(old, to);
      put(to, fma(old, keep, mul(acc[r][n], gain)));
    }
  }
}

// Head dims that are no multiple of 8 end in a scalar tail with the same chains.
template <class T>
void merge_tail(const float* w, int rows, int dim, const Cut<T>& cut, int low, int high, const Merge& m, float* out) {
  for (int r = 0; r < rows; ++r) {
    if (!m.live[r]) continue;
    for (int d = dim & ~7; d < dim; ++d) {
      float acc = 0.0f;
      for (int j = low; j < high; ++j) acc = fma1(w[r * kCut + j], widen(cut.v[j / kKeyBlock][(j % kKeyBlock) * dim + d]), acc);
      out[r * dim + d] = fma1(out[r * dim + d], m.keep[r], acc * m.gain[r]);
    }
  }
}

// Folds the cut into R rows of `st` from row `r0` on; `s` is scratch for its scores.
template <int R, class T>
void tile_cut(RowState& st, int r0, int dim, const Cut<T>& cut, Soon<T> soon, float* s) {
  const Seen<R> seen = seen_keys<R>(st, r0, cut.begin);
  if (seen.lowest >= seen.highest) return;
  prefetch_rest(soon.values, dim, seen.first, seen.last);
  score_tile<R>(st.q + r0 * dim, dim, cut, soon.values.blocks, seen.first, seen.last, s);
  Merge m;
  weigh_tile<R>(st, r0, seen, s, m);
  if constexpr (kScaled<T>) {
    for (int r = 0; r < R; ++r) scale_weights(s + r * kCut, cut, seen.low[r], seen.high[r]);
  }
  prefetch_rest(soon.keys, dim, seen.first, seen.last);
  constexpr int N = kWide<R>;
  const int low = seen.lowest, high = seen.highest;
  float* out = st.out + r0 * dim;
  int d = 0;
  for (; d + 16 * N <= dim; d += 16 * N) merge_values<f32x16, R, N>(s, dim, cut, low, high, d, soon.keys.blocks, m, out);
  for (; d + 16 <= dim; d += 16) merge_values<f32x16, R, 1>(s, dim, cut, low, high, d, soon.keys.blocks, m, out);
  for (; d + 8 <= dim; d += 8) merge_values<f32x8, R, 1>(s, dim, cut, low, high, d, soon.keys.blocks, m, out);
  if (d < dim) merge_tail(s, R, dim, cut, low, high, m, out);
}

template <class T>
void dispatch_tile(int rows, RowState& st, int r0, int dim, const Cut<T>& cut, Soon<T> soon, float* s) {
  switch (rows) {
    case 1: return tile_cut<1>(st, r0, dim, cut, soon, s);
    case 2: return tile_cut<2>(st, r0, dim, cut, soon, s);
    case 3: return tile_cut<3>(st, r0, dim, cut, soon, s);
    case 4: return tile_cut<4>(st, r0, dim, cut, soon, s);
    case 5: return tile_cut<5>(st, r0, dim, cut, soon, s);
    default: return tile_cut<6>(st, r0, dim, cut, soon, s);
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
