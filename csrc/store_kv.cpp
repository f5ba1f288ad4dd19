// Keys and values into their pages, and the op that turns heads first. Page layouts: csrc/include/rootlet/attention.h.
#include "rootlet/attention.h"
#include "rootlet/dispatch.h"
#include "rootlet/quantize.h"
#include "rootlet/rope.h"
#include "rootlet/simd.h"
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

ROOTLET_OP(store_kv);
ROOTLET_OP(rope_store);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
