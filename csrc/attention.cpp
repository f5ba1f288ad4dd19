// Paged attention over the work list: decode, extend and mixed steps are the same loop (architecture D7).
//
// A work item is one kv head and up to 16 query tokens of one request. Its rows (token-major, then the group's heads) are taken in tiles of up to 6:
// keys lie 16 side by side for each dimension, so QK is a 6 x 16 outer-product tile without horizontal sums, and PV is a 6 x 16 tile over values.
// f16 and int8 are widened on load. Cuts of 128 keys are the outer loop: 16 KB of K and of V at dim 64 serve all tiles of the item from L1/L2.
//
//     for each cut (ascending) -> for each tile: scores = QK | softmax of the cut | acc = PV, merged into the row's (max, sum, out)
//
// Order that fixes the bits of a row: score = fma chain over dimensions from 0 with q * scale; m = max; w = exp(s - m), 0 where masked; sum in 16
// lanes (lane = key % 16) over ascending blocks, lanes joined (l, l + 8) then hsum's tree; acc = fma chain over ascending keys. Merge:
// int8 pages: the key's scale multiplies the finished score, the value's scale the weight (after the sum of weights was taken).
// M' = max(M, m), a = exp(M - M'), b = exp(m - M'); sum = fma(sum, a, cut_sum * b), out = fma(out, a, acc * b). Tile heights never enter.
// Traffic: each key and value is read once per item. Decode at long contexts is DRAM-bound: V is prefetched under QK, the next cut's K under PV.
#include "rootlet/attention_tile.h"
#include "rootlet/dispatch.h"
#include "rootlet/quantize.h"
#include "rootlet/rope.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE void store_kv8(float* p, f32x8 x) { store(p, x); }
RL_INLINE void store_kv8(uint16_t* p, f32x8 x) { store_f16(p, x); }
RL_INLINE void narrow(float* p, float x) { *p = x; }
RL_INLINE void narrow(uint16_t* p, float x) { *p = f32_to_f16(x); }

// n values to T, `step` elements apart.
template <class T>
RL_INLINE void scatter(const float* from, T* to, int n, int step) {
  int d = 0;
  for (; d + 8 <= n; d += 8) {
    T eight[8];
    store_kv8(eight, load(from + d));
    for (int i = 0; i < 8; ++i) to[(d + i) * step] = eight[i];
  }
  for (; d < n; ++d) narrow(to + d * step, from[d]);
}

// x [n] in int8, `step` elements apart, and its scale: d = max|x| / 127, q to nearest even. inf or NaN inside: d = NaN, so it is seen.
RL_INLINE void scatter_int8(const float* x, int8_t* to, int n, int step, float* scale) {
  uint32_t top = 0;
  for (int d = 0; d < n; ++d) {
    const uint32_t magnitude = bits_of(x[d]) & 0x7fffffffu;
    top = magnitude > top ? magnitude : top;
  }
  const BlockScale s = block_scale(float_of(top));
  *scale = s.d;
  int8_t q[kMaxHeadDim];
  for (int d = 0; d < n; ++d) {
    q[d] = s.inverse == 0.0f ? int8_t{0} : static_cast<int8_t>(bits_of(x[d] * s.inverse + 12582912.0f) - 0x4b400000u);
  }
  for (int d = 0; d < n; ++d) to[d * step] = q[d];
}

// k and v [dim] of one token and kv head to the token's slot.
template <class T>
RL_INLINE void store_head(const StoreKvArgs& a, int t, int h) {
  const int page = a.slots[t] / a.page_size, offset = a.slots[t] % a.page_size;
  const int64_t base = (static_cast<int64_t>(page) * a.kv_heads + h) * a.page_size * a.dim;
  T* k_to = static_cast<T*>(a.k_pages) + base + static_cast<int64_t>(offset / kKeyBlock) * a.dim * kKeyBlock + offset % kKeyBlock;
  T* v_to = static_cast<T*>(a.v_pages) + base + static_cast<int64_t>(offset) * a.dim;
  const float *k = a.k + t * a.k_stride + h * a.dim, *v = a.v + t * a.v_stride + h * a.dim;
  if constexpr (kScaled<T>) {
    const int64_t at = (static_cast<int64_t>(page) * a.kv_heads + h) * a.page_size + offset;
    scatter_int8(k, k_to, a.dim, kKeyBlock, a.k_scales + at);
    scatter_int8(v, v_to, a.dim, 1, a.v_scales + at);
  } else {
    scatter(k, k_to, a.dim, kKeyBlock);
    scatter(v, v_to, a.dim, 1);
  }
}

RL_INLINE void store_token_head(const StoreKvArgs& a, int t, int h) {
  switch (a.kind) {
    case KvKind::kF32: return store_head<float>(a, t, h);
    case KvKind::kF16: return store_head<uint16_t>(a, t, h);
    case KvKind::kI8: return store_head<int8_t>(a, t, h);
  }
}

void store_kv(const void* p, Worker& w) {
  const auto& a = *static_cast<const StoreKvArgs*>(p);
  const Range mine = w.share(a.tokens.get() * a.kv_heads);
  for (int u = mine.begin; u < mine.end; ++u) store_token_head(a, u / a.kv_heads, u % a.kv_heads);
}

void rope_store(const void* p, Worker& w) {
  const auto& a = *static_cast<const RopeStoreArgs*>(p);
  const int heads = a.rope.heads, first_kv = heads - a.store.kv_heads;
  const Range mine = w.share(a.rope.rows.get() * heads);
  for (int u = mine.begin; u < mine.end; ++u) {
    rotate_head(a.rope, u);
    if (u % heads >= first_kv) store_token_head(a.store, u / heads, u % heads - first_kv);
  }
}

// One request's keys and values of one kv head.
template <class T>
struct Pages {
  const T* k;
  const T* v;
  const float* k_scales;
  const float* v_scales;
  const int32_t* table;
  int64_t page_elements;  // all heads of one page
  int64_t head_offset;
  int page_size;
  int dim;

  // Base of the 16-key block that holds `position`.
  int64_t block(int position) const {
    return table[position / page_size] * page_elements + head_offset + static_cast<int64_t>(position % page_size) * dim;
  }
};

// Blocks of the cut at `begin` that hold keys [low, high); blocks outside repeat a valid one, so that prefetches stay inside the pool.
template <class T>
void locate(const Pages<T>& pages, int begin, int low, int high, Cut<T>& cut) {
  cut.begin = begin;
  for (int b = 0; b < kBlocks; ++b) {
    const int position = most(least(begin + b * kKeyBlock, (high - 1) & ~(kKeyBlock - 1)), low & ~(kKeyBlock - 1));
    const int64_t at = pages.block(position);
    cut.k[b] = pages.k + at;
    cut.v[b] = pages.v + at;
    if constexpr (kScaled<T>) {
      cut.k_scale[b] = pages.k_scales + at / pages.dim;
      cut.v_scale[b] = pages.v_scales + at / pages.dim;
    }
    const int next = least(begin + kCut + b * kKeyBlock, (high - 1) & ~(kKeyBlock - 1));
    cut.next_k[b] = pages.k + pages.block(most(next, low & ~(kKeyBlock - 1)));
  }
}

struct Item {
  int q_begin, q_count, kv_head, batch, kv_begin, kv_len;
};

// Up to kGroupRows rows of one item: what they read, what they hold, where their answers go.
template <class T>
struct Rows {
  RowState st;
  Pages<T> pages;
  float* scores;  // [kTileRows, kCut]
  int first, count, low, high;
};

RL_INLINE int row_token(const AttentionArgs& a, const Item& it, int row) { return it.q_begin + row / (a.heads / a.kv_heads); }
RL_INLINE int row_head(const AttentionArgs& a, const Item& it, int row) {
  const int group = a.heads / a.kv_heads;
  return it.kv_head * group + row % group;
}

template <class T>
void open_rows(const AttentionArgs& a, const Item& it, int first, int count, char* scratch, Rows<T>& x) {
  const int dim = a.dim;
  x.scores = reinterpret_cast<float*>(scratch);
  x.st.q = x.scores + kTileRows * kCut;
  x.st.out = x.st.q + kGroupRows * dim;
  x.first = first, x.count = count, x.low = it.kv_len, x.high = 0;
  for (int r = 0; r < count; ++r) {
    const int token = row_token(a, it, first + r);
    const int position = a.prefix_lens[it.batch] + token - a.qo_indptr[it.batch];
    x.st.low[r] = a.window > 0 ? most(it.kv_begin, position - a.window + 1) : it.kv_begin;
    x.st.high[r] = least(position + 1, it.kv_len);
    x.low = least(x.low, x.st.low[r]);
    x.high = most(x.high, x.st.high[r]);
    x.st.best[r] = -__builtin_inff();
    x.st.total[r] = 0.0f;
    const float* q = a.q + token * a.q_stride + row_head(a, it, first + r) * dim;
    for (int d = 0; d < dim; ++d) x.st.q[r * dim + d] = q[d] * a.scale, x.st.out[r * dim + d] = 0.0f;
  }
  const int64_t head_elements = static_cast<int64_t>(a.page_size) * dim;
  x.pages = {static_cast<const T*>(a.k_pages), static_cast<const T*>(a.v_pages), a.k_scales, a.v_scales, a.page_table + a.row_ids[it.batch] * a.page_stride,
             head_elements * a.kv_heads, head_elements * it.kv_head, a.page_size, dim};
}

// Folds the cut at `begin` into all rows. `ahead`: the cut after it comes next on this worker.
template <class T>
void fold_cut(Rows<T>& x, int dim, int begin, bool ahead) {
  Cut<T> cut;
  locate(x.pages, begin, x.low, x.high, cut);
  const int tiles = (x.count + kTileRows - 1) / kTileRows;
  for (int t = 0; t < tiles; ++t) {
    const int from = x.count * t / tiles, to = x.count * (t + 1) / tiles;
    dispatch_tile(to - from, x.st, from, dim, cut, t == 0 && ahead, x.scores);
  }
}

RL_INLINE void write_row(const AttentionArgs& a, const Item& it, int row, const float* acc, float total) {
  const int64_t at = (static_cast<int64_t>(row_token(a, it, row)) * a.heads + row_head(a, it, row)) * a.dim;
  float unread[kMaxHeadDim];
  float* out = a.out ? a.out + at : unread;
  for (int d = 0; d < a.dim; ++d) out[d] = total == 0.0f ? 0.0f : acc[d] / total;
  if (a.q8) quantize_row(out, a.dim, a.q8 + at, a.scales + at / kQuantBlock);
}

template <class T>
void attend_rows(const AttentionArgs& a, const Item& it, int first, int count, char* scratch) {
  Rows<T> x;
  open_rows(a, it, first, count, scratch, x);
  for (int begin = x.low / kCut * kCut; begin < x.high; begin += kCut) fold_cut(x, a.dim, begin, begin + kCut < x.high);
  for (int r = 0; r < count; ++r) write_row(a, it, first + r, x.st.out + r * a.dim, x.st.total[r]);
}

RL_INLINE Item item_of(const AttentionArgs& a, int i) {
  const int32_t* x = a.work + static_cast<int64_t>(i) * kWorkItemWords;
  return {x[0], x[1], x[2], x[3], x[4], x[5]};
}

// Cuts that an item of one query token touches.
RL_INLINE int num_cuts(const AttentionArgs& a, const Item& it) {
  const int low = a.window > 0 ? most(it.kv_begin, it.kv_len - a.window) : it.kv_begin;
  return (it.kv_len - 1) / kCut - low / kCut + 1;
}

// Number of (item, cut) units when the step is a few decode rows that would leave workers idle, else 0. The same on every worker.
int units_to_split(const AttentionArgs& a, const Worker& w) {
  const int group = a.heads / a.kv_heads, items = *a.num_work;
  if (w.num_threads() == 1 || items > kSplitItems * w.num_threads() || group > kTileRows) return 0;
  int64_t units = 0;
  for (int i = 0; i < items; ++i) {
    const Item it = item_of(a, i);
    if (it.q_count != 1) return 0;
    units += num_cuts(a, it);
  }
  return units > items && units * group * (a.dim + 2) <= a.num_partials ? static_cast<int>(units) : 0;
}

// Cuts of decode rows dealt to the team; each leaves (max, sum, acc) of its rows, merged in ascending order by the same operations as in one pass.
template <class T>
void attend_split(const AttentionArgs& a, Worker& w, int units, char* scratch) {
  const int group = a.heads / a.kv_heads, dim = a.dim;
  const int64_t row_floats = dim + 2, unit_floats = group * row_floats;
  for (int u = w.take(); u < units; u = w.take()) {
    int i = 0, cut = u;
    Item it = item_of(a, 0);
    for (int n = num_cuts(a, it); cut >= n; n = num_cuts(a, it)) {
      cut -= n;
      it = item_of(a, ++i);
    }
    Rows<T> x;
    open_rows(a, it, 0, group, scratch, x);
    fold_cut(x, dim, (x.low / kCut + cut) * kCut, false);
    for (int r = 0; r < group; ++r) {
      float* to = a.partials + u * unit_floats + r * row_floats;
      to[0] = x.st.best[r], to[1] = x.st.total[r];
      memcpy(to + 2, x.st.out + r * dim, sizeof(float) * static_cast<size_t>(dim));
    }
  }
  w.barrier();
  const Range mine = w.share(*a.num_work * group);
  int64_t u = 0;
  auto* acc = reinterpret_cast<float*>(scratch);
  for (int i = 0; i < *a.num_work; ++i) {
    const Item it = item_of(a, i);
    const int cuts = num_cuts(a, it);
    for (int r = most(0, mine.begin - i * group); r < least(group, mine.end - i * group); ++r) {
      float best = -__builtin_inff(), total = 0.0f;
      for (int d = 0; d < dim; ++d) acc[d] = 0.0f;
      for (int c = 0; c < cuts; ++c) {
        const float* from = a.partials + (u + c) * unit_floats + r * row_floats;
        const float top = best > from[0] ? best : from[0];
        const float keep = exp1(best - top), gain = exp1(from[0] - top);
        total = fma1(total, keep, from[1] * gain);
        for (int d = 0; d < dim; ++d) acc[d] = fma1(acc[d], keep, from[2 + d] * gain);
        best = top;
      }
      write_row(a, it, r, acc, total);
    }
    u += cuts;
  }
}

template <class T>
void attend(const AttentionArgs& a, Worker& w) {
  const size_t bytes = sizeof(float) * (kTileRows * kCut + 2 * static_cast<size_t>(kGroupRows) * a.dim);
  char* scratch = static_cast<char*>(w.scratch(bytes));
  if (const int units = units_to_split(a, w)) return attend_split<T>(a, w, units, scratch);
  for (int i = w.take(); i < *a.num_work; i = w.take()) {
    const Item it = item_of(a, i);
    const int rows = it.q_count * (a.heads / a.kv_heads);
    for (int first = 0; first < rows; first += kGroupRows) attend_rows<T>(a, it, first, least(kGroupRows, rows - first), scratch);
  }
}

void attention(const void* p, Worker& w) {
  const auto& a = *static_cast<const AttentionArgs*>(p);
  switch (a.kind) {
    case KvKind::kF32: return attend<float>(a, w);
    case KvKind::kF16: return attend<uint16_t>(a, w);
    case KvKind::kI8: return attend<int8_t>(a, w);
  }
}

ROOTLET_OP(store_kv);
ROOTLET_OP(rope_store);
ROOTLET_OP(attention);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
