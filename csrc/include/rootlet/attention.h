// Argument blocks of the attention ops. Shapes: KVLayer ("blocked") and AttentionMeta in src/rootlet/kernels/ops.py.
#pragma once
#include <type_traits>

#include "rootlet/elementwise.h"

namespace rootlet {

inline constexpr int kKeyBlock = 16;      // keys that lie side by side for each dimension
inline constexpr int kCut = 128;          // positions a softmax cut spans: the grid of the definition
inline constexpr int kMaxHeadDim = 512;
inline constexpr int kWorkItemWords = 8;  // q_begin, q_count, kv_head, batch_index, kv_begin, kv_len, shared, members

// What pages hold. int8: one float scale a token and kv head beside them, value = scale * q.
enum class KvKind : int32_t { kF32, kF16, kI8 };
template <class T>
inline constexpr bool kScaled = std::is_same_v<T, int8_t>;

struct StoreKvArgs {
  const float* k;  // [T, kv_heads * dim], rows k_stride apart
  const float* v;
  int64_t k_stride, v_stride;
  void* k_pages;  // [pages, kv_heads, page_size/16, dim, 16]
  void* v_pages;  // [pages, kv_heads, page_size, dim]
  float* k_scales;  // [pages, kv_heads, page_size], int8 only
  float* v_scales;
  const int32_t* slots;  // [T]
  Count tokens;
  int32_t kv_heads, dim, page_size;
  KvKind kind;
};

// The heads of q and k turned, and each k head put into its page with its v: no barrier between.
struct RopeStoreArgs {
  RopeArgs rope;       // heads = query heads + kv heads
  StoreKvArgs store;   // k = rope.out from the first kv head on
};

struct AttentionArgs {
  const float* q;  // [T, heads * dim], rows q_stride apart
  int64_t q_stride;
  float* out;
  const void* k_pages;
  const void* v_pages;
  const float* k_scales;
  const float* v_scales;
  const int32_t* page_table;  // [rows, page_stride]
  const int32_t* row_ids;
  const int32_t* qo_indptr;
  const int32_t* prefix_lens;
  const int32_t* order;  // [rows]: the requests of shared items
  const int32_t* work;   // [num_work, 8]
  const int32_t* num_work;
  float* partials;  // [num_partials] scratch that all workers share: few long rows are split over the team by cuts
  int64_t num_partials;
  int64_t page_stride;
  int32_t heads, kv_heads, dim, page_size;
  KvKind kind;
  int32_t window;  // 0 = all keys
  float scale;
  int8_t* q8;        // null, or [T, heads * dim]: the result in int8 blocks of 32 (dim a multiple of 32); then `out` may be null
  ActScale* scales;  // [T, heads * dim / 32]
};

}  // namespace rootlet
