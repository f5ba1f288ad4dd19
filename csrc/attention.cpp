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
// Traffic: each key and value is read once per item, and the keys of a shared item once for all its requests. Decode at long contexts is DRAM-bound:
// the cut's values are fetched under QK, the next cut's keys under PV, also when that cut is another item's (a worker takes one item ahead).
#include "rootlet/attention_tile.h"
#include "rootlet/dispatch.h"
#include "rootlet/quantize.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

// One request's keys and values of one kv head.
template <class T>
struct Pages {
  const T* k;  // of the head, in page 0
  const T* v;
  const float* k_scales;
  const float* v_scales;
  const int32_t* table;
  int64_t page_elements;  // all heads of one page
  int page_bits;          // log2 of the keys a page
  int dim;
};

// Blocks of the cut at `begin` that hold keys [low, high); blocks outside repeat a valid one, so that prefetches stay inside the pool.
template <class T>
void locate(const Pages<T>& pages, int begin, int low, int high, Cut<T>& cut) {
  const int first = low & ~(kKeyBlock - 1), last = (high - 1) & ~(kKeyBlock - 1), mask = (1 << pages.page_bits) - 1;
  cut.begin = begin;
  for (int b = 0; b < kBlocks; ++b) {
    const int position = most(least(begin + b * kKeyBlock, last), first);
    const int64_t at = pages.table[position >> pages.page_bits] * pages.page_elements + static_cast<int64_t>(position & mask) * pages.dim;
    cut.k[b] = pages.k + at;
    cut.v[b] = pages.v + at;
    if constexpr (kScaled<T>) {
      cut.k_scale[b] = pages.k_scales + at / pages.dim;
      cut.v_scale[b] = pages.v_scales + at / pages.dim;
    }
  }
}

// One line of the work list. `shared` > 0: the item is `q_count` requests with one query token each, whose keys [0, shared) lie in the same pages;
// `members` of the order list names them. Else: `q_count` query tokens of request `batch`.
struct Item {
  int q_begin, q_count, kv_head, batch, kv_begin, kv_len, shared, members;
};

RL_INLINE Item item_of(const AttentionArgs& a, int i) {
  Item it;
  static_assert(sizeof it == sizeof(int32_t) * kWorkItemWords);
  memcpy(&it, a.work + static_cast<int64_t>(i) * kWorkItemWords, sizeof it);
  return it;
}

// A query token: its row of q, its request, its position.
struct Query {
  int token, batch, position;
};

RL_INLINE Query query_of(const AttentionArgs& a, const Item& it, int i) {
  const int batch = it.shared > 0 ? a.order[it.members + i] : it.batch;
  const int token = it.shared > 0 ? a.qo_indptr[batch] : it.q_begin + i;
  return {token, batch, a.prefix_lens[batch] + token - a.qo_indptr[batch]};
}

RL_INLINE int first_seen(const AttentionArgs& a, const Item& it, int position) {
  return a.window > 0 ? most(it.kv_begin, position - a.window + 1) : it.kv_begin;
}

template <class T>
Pages<T> pages_of(const AttentionArgs& a, const Item& it, int batch) {
  const int64_t head = static_cast<int64_t>(a.page_size) * it.kv_head, scales = kScaled<T> ? head : 0;
  return {static_cast<const T*>(a.k_pages) + head * a.dim, static_cast<const T*>(a.v_pages) + head * a.dim, a.k_scales + scales, a.v_scales + scales,
          a.page_table + a.row_ids[batch] * a.page_stride, static_cast<int64_t>(a.page_size) * a.dim * a.kv_heads,
          __builtin_ctz(static_cast<unsigned>(a.page_size)), a.dim};
}

RL_INLINE RowState row_state(const AttentionArgs& a, char* scratch) {
  RowState st;
  st.q = reinterpret_cast<float*>(scratch) + kTileRows * kCut;
  st.out = st.q + kGroupRows * a.dim;
  return st;
}

// Rows [first, first + count) of the item, with nothing folded in yet.
void open_rows(const AttentionArgs& a, const Item& it, int first, int count, RowState& st) {
  const int group = a.heads / a.kv_heads, dim = a.dim;
  for (int r = 0; r < count; ++r) {
    const Query query = query_of(a, it, (first + r) / group);
    st.low[r] = first_seen(a, it, query.position);
    st.high[r] = it.shared > 0 ? query.position + 1 : least(query.position + 1, it.kv_len);
    st.best[r] = -__builtin_inff();
    st.total[r] = 0.0f;
    const float* q = a.q + query.token * a.q_stride + (it.kv_head * group + (first + r) % group) * dim;
    for (int d = 0; d < dim; ++d) st.q[r * dim + d] = q[d] * a.scale, st.out[r * dim + d] = 0.0f;
  }
}

// Folds the cut into rows [from, to). What comes next on this worker is fetched by the first tile.
template <class T>
void fold_cut(RowState& st, int from, int to, int dim, const Cut<T>& cut, Soon<T> soon, float* scores) {
  const int count = to - from, tiles = (count + kTileRows - 1) / kTileRows;
  for (int t = 0; t < tiles; ++t) {
    const int begin = count * t / tiles, end = count * (t + 1) / tiles;
    dispatch_tile(end - begin, st, from + begin, dim, cut, t == 0 ? soon : Soon<T>{}, scores);
  }
}

RL_INLINE void write_row(const AttentionArgs& a, const Item& it, int row, const float* acc, float total) {
  const int group = a.heads / a.kv_heads;
  const int64_t at = (static_cast<int64_t>(query_of(a, it, row / group).token) * a.heads + it.kv_head * group + row % group) * a.dim;
  float unread[kMaxHeadDim];
  float* out = a.out ? a.out + at : unread;
  for (int d = 0; d < a.dim; ++d) out[d] = total == 0.0f ? 0.0f : acc[d] / total;
  if (a.q8) quantize_row(out, a.dim, a.q8 + at, a.scales + at / kQuantBlock);
}

// One cut on a worker's way through its items. An item's rows are taken in groups of up to kGroupRows; a group passes over one stretch of keys, or, when
// the item is shared, over the shared keys with all its rows and then over each request's own keys with that request's rows.
template <class T>
struct Stop {
  Item it;
  int first, count;      // the group's rows
  int stretch;           // 0, or 1 + the request whose own keys these are
  int from, to;          // rows of the group that see the stretch
  int low, high, begin;  // its keys, and where this cut begins
  bool open, any;        // first of its group; false: no work is left
  Pages<T> pages;
  Cut<T> cut;
};

template <class T>
void enter_stretch(const AttentionArgs& a, Stop<T>& x) {
  const int group = a.heads / a.kv_heads, shared = x.it.shared;
  const bool own = x.stretch > 0;
  const int member = x.first / group + x.stretch - 1;
  x.from = own ? most(member * group - x.first, 0) : 0;
  x.to = own ? least((member + 1) * group - x.first, x.count) : x.count;
  const Query head = query_of(a, x.it, (x.first + x.from) / group);
  x.low = own ? most(shared, first_seen(a, x.it, head.position)) : first_seen(a, x.it, head.position);
  if (own) {
    x.high = head.position + 1;
  } else if (shared > 0) {
    for (int i = 1; i < x.it.q_count; ++i) x.low = least(x.low, first_seen(a, x.it, query_of(a, x.it, i).position));
    x.high = shared;
  } else {
    x.high = least(query_of(a, x.it, (x.first + x.count - 1) / group).position + 1, x.it.kv_len);
  }
  x.begin = x.low / kCut * kCut;
  x.pages = pages_of<T>(a, x.it, head.batch);
}

// The next group of rows: of the same item, else of an item that no worker has.
template <class T>
void enter_group(const AttentionArgs& a, Worker& w, Stop<T>& x) {
  const int group = a.heads / a.kv_heads;
  x.first += x.count;
  if (!x.any || x.first >= x.it.q_count * group) {
    const int i = w.take();
    x.any = i < *a.num_work;
    if (!x.any) return;
    x.it = item_of(a, i);
    x.first = 0;
  }
  x.count = least(kGroupRows, x.it.q_count * group - x.first);
  x.open = true;
  x.stretch = 0;
  enter_stretch(a, x);
}

// Moves to the next cut, if any is left.
template <class T>
void advance(const AttentionArgs& a, Worker& w, Stop<T>& x) {
  x.open = false;
  x.begin += kCut;
  while (x.begin >= x.high) {
    if (x.it.shared > 0 && x.to < x.count + (x.stretch == 0)) {
      ++x.stretch;
      enter_stretch(a, x);
    } else {
      enter_group(a, w, x);
      if (!x.any) return;
    }
  }
  locate(x.pages, x.begin, x.low, x.high, x.cut);
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
  RowState st = row_state(a, scratch);
  Cut<T> x;
  for (int u = w.take(); u < units; u = w.take()) {
    int i = 0, cut = u;
    Item it = item_of(a, 0);
    for (int n = num_cuts(a, it); cut >= n; n = num_cuts(a, it)) {
      cut -= n;
      it = item_of(a, ++i);
    }
    open_rows(a, it, 0, group, st);
    const int low = st.low[0], high = st.high[0];
    locate(pages_of<T>(a, it, it.batch), (low / kCut + cut) * kCut, low, high, x);
    fold_cut(st, 0, group, dim, x, Soon<T>{{x.v, x.v_scale}, {}}, reinterpret_cast<float*>(scratch));
    for (int r = 0; r < group; ++r) {
      float* to = a.partials + u * unit_floats + r * row_floats;
      to[0] = st.best[r], to[1] = st.total[r];
      memcpy(to + 2, st.out + r * dim, sizeof(float) * static_cast<size_t>(dim));
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
  RowState st = row_state(a, scratch);
  Stop<T> stops[2] = {};
  int now = 0;
  advance(a, w, stops[now]);
  while (stops[now].any) {
    const Stop<T>& x = stops[now];
    Stop<T>& next = stops[now ^ 1];
    next = x;
    advance(a, w, next);
    if (x.open) open_rows(a, x.it, x.first, x.count, st);
    const Soon<T> soon{{x.cut.v, x.cut.v_scale}, next.any ? Wanted<T>{next.cut.k, next.cut.k_scale} : Wanted<T>{}};
    fold_cut(st, x.from, x.to, a.dim, x.cut, soon, reinterpret_cast<float*>(scratch));
    if (next.open || !next.any) {
      for (int r = 0; r < x.count; ++r) write_row(a, x.it, x.first + r, st.out + r * a.dim, st.total[r]);
    }
    now ^= 1;
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

ROOTLET_OP(attention);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
