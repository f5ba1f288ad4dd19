// The tile of attention: up to 6 rows against one cut of 128 keys. Included by attention.cpp only, once for each instruction set; the order of
// operations that fixes a row's bits is described there.
#pragma once
#include <type_traits>

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
template <class T>
constexpr bool kScaled = std::is_same_v<T, int8_t>;
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

// The cut being worked on: base of each 16-key block, and of the next cut's keys.
template <class T>
struct Cut {
  int begin;
  const T* k[kBlocks];
  const T* v[kBlocks];
  const T* next_k[kBlocks];
  const float* k_scale[kBlocks];  // int8 only: of the block's 16 keys
  const float* v_scale[kBlocks];
};

// Scores of R rows against N key blocks; `s` is [R, kCut] at the first block. Prefetches the blocks' values line by line beside their keys.
template <int R, int N, class T>
RL_INLINE void score_blocks(const float* q, int dim, const T* const* k, const T* const* v, const float* const* k_scale, float* s) {
  f32x16 acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) set(acc[r][n], 0.0f);
  }
  for (int d = 0; d < dim; ++d) {
    f32x16 key[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      get(key[n], k[n] + d * kKeyBlock);
      if (d * kKeyBlock * static_cast<int>(sizeof(T)) % 64 == 0) prefetch(v[n] + d * kKeyBlock);
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
RL_INLINE void score_tile(const float* q, int dim, const Cut<T>& cut, int first, int last, float* s) {
  constexpr int N = kWide<R>;
  int b = first;
  for (; b + N <= last; b += N) score_blocks<R, N>(q, dim, cut.k + b, cut.v + b, cut.k_scale + b, s + b * kKeyBlock);
  for (; b < last; ++b) score_blocks<R, 1>(q, dim, cut.k + b, cut.v + b, cut.k_scale + b, s + b * kKeyBlock);
}

// Masks one row of scores to keys [low, high) of the cut, turns it into weights, and returns (max, sum). Blocks [first, last) are written whole.
RL_INLINE void softmax_row(float* s, int first, int last, int low, int high, float* best, float* total) {
  for (int j = first * kKeyBlock; j < low; ++j) s[j] = -__builtin_inff();
  for (int j = high; j < last * kKeyBlock; ++j) s[j] = -__builtin_inff();
  f32x8 top = set1(-__builtin_inff());
  for (int j = first * kKeyBlock; j < last * kKeyBlock; j += 8) top = max(top, load(s + j));
  const float m = hmax(top);
  const f32x8 shift = set1(m);
  f32x8 sum0 = set1(0.0f), sum1 = set1(0.0f);
  for (int j = first * kKeyBlock; j < last * kKeyBlock; j += kKeyBlock) {
    const f32x8 w0 = exp8(sub(load(s + j), shift)), w1 = exp8(sub(load(s + j + 8), shift));
    store(s + j, w0);
    store(s + j + 8, w1);
    sum0 = add(sum0, w0);
    sum1 = add(sum1, w1);
  }
  *best = m;
  *total = hsum(add(sum0, sum1));
}

// The scales of int8 values go into the weights, after the sum was taken. Masked weights stay 0 whatever the scale.
template <class T>
RL_INLINE void scale_weights(float* s, const Cut<T>& cut, int low, int high) {
  for (int b = low / kKeyBlock; b * kKeyBlock < high; ++b) {
    const int begin = most(low, b * kKeyBlock), end = least(high, (b + 1) * kKeyBlock);
    for (int j = begin; j < end; ++j) s[j] *= cut.v_scale[b][j - b * kKeyBlock];
  }
}

// acc = weights x values over keys [low, high) of the cut, for N vectors of dimensions from `d0`.
template <class V, int R, int N, class T>
RL_INLINE void value_tile(const float* w, int dim, const Cut<T>& cut, int low, int high, int d0, bool ahead, V (*acc)[N]) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) set(acc[r][n], 0.0f);
  }
  for (int b = low / kKeyBlock; b * kKeyBlock < high; ++b) {
    const T* v = cut.v[b] + d0;
    const T* next = cut.next_k[b] + d0;
    const int end = least(high - b * kKeyBlock, kKeyBlock);
    for (int j = most(low - b * kKeyBlock, 0); j < end; ++j) {
      if (ahead) prefetch(next + j * dim);
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

// How a tile's rows fold a cut into their running output.
struct Merge {
  float keep[kTileRows];
  float gain[kTileRows];
  bool live[kTileRows];
};

template <class V, int R, int N, class T>
RL_INLINE void merge_values(const float* w, int dim, const Cut<T>& cut, int low, int high, int d0, bool ahead, const Merge& m, float* out) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  V acc[R][N];
  value_tile<V, R, N>(w, dim, cut, low, high, d0, ahead, acc);
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

// Folds the cut into R rows of `st` from row `r0` on. `ahead`: prefetch the next cut's keys.
template <int R, class T>
void tile_cut(RowState& st, int r0, int dim, const Cut<T>& cut, bool ahead, float* s) {
  int low = kCut, high = 0;
  for (int r = 0; r < R; ++r) {
    low = least(low, most(st.low[r0 + r] - cut.begin, 0));
    high = most(high, least(st.high[r0 + r] - cut.begin, kCut));
  }
  if (low >= high) return;
  const int first = low / kKeyBlock, last = (high + kKeyBlock - 1) / kKeyBlock;
  score_tile<R>(st.q + r0 * dim, dim, cut, first, last, s);
  Merge m;
  for (int r = 0; r < R; ++r) {
    const int row = r0 + r, lo = most(st.low[row] - cut.begin, 0), hi = least(st.high[row] - cut.begin, kCut);
    m.live[r] = lo < hi;
    if (!m.live[r]) {
      for (int j = first * kKeyBlock; j < last * kKeyBlock; ++j) s[r * kCut + j] = 0.0f;
      continue;
    }
    float best, total;
    softmax_row(s + r * kCut, first, last, lo, hi, &best, &total);
    if constexpr (kScaled<T>) scale_weights(s + r * kCut, cut, lo, hi);
    const float top = st.best[row] > best ? st.best[row] : best;
    m.keep[r] = exp1(st.best[row] - top);
    m.gain[r] = exp1(best - top);
    st.best[row] = top;
    st.total[row] = fma1(st.total[row], m.keep[r], total * m.gain[r]);
  }
  constexpr int N = kWide<R>;
  float* out = st.out + r0 * dim;
  int d = 0;
  for (; d + 16 * N <= dim; d += 16 * N) merge_values<f32x16, R, N>(s, dim, cut, low, high, d, ahead, m, out);
  for (; d + 16 <= dim; d += 16) merge_values<f32x16, R, 1>(s, dim, cut, low, high, d, ahead, m, out);
  for (; d + 8 <= dim; d += 8) merge_values<f32x8, R, 1>(s, dim, cut, low, high, d, ahead, m, out);
  if (d < dim) merge_tail(s, R, dim, cut, low, high, m, out);
}

template <class T>
void dispatch_tile(int rows, RowState& st, int r0, int dim, const Cut<T>& cut, bool ahead, float* s) {
  switch (rows) {
    case 1: return tile_cut<1>(st, r0, dim, cut, ahead, s);
    case 2: return tile_cut<2>(st, r0, dim, cut, ahead, s);
    case 3: return tile_cut<3>(st, r0, dim, cut, ahead, s);
    case 4: return tile_cut<4>(st, r0, dim, cut, ahead, s);
    case 5: return tile_cut<5>(st, r0, dim, cut, ahead, s);
    default: return tile_cut<6>(st, r0, dim, cut, ahead, s);
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
