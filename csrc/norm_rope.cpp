// Embedding, norms, rotary embedding, activation, gather. Each row is reduced in 16 lanes (element i in lane i % 16, ascending), then in one
// fixed tree. All are memory-light next to the matrix products: rows, or pieces of rows, are split statically.
#include <cstring>

#include "rootlet/dispatch.h"
#include "rootlet/elementwise.h"
#include "rootlet/linear.h"
#include "rootlet/math.h"
#include "rootlet/norm.h"
#include "rootlet/rope.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kPiece = 256;  // elements of a row that one thread takes at once in silu_and_mul

// ---- embedding

RL_INLINE int nibble(const uint8_t* qs, int i) { return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4; }

RL_INLINE uint16_t u16_at(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return h;
}

// One GGUF block to 32 floats: d * (q - zero), or d * q + m with two roundings, as the format is defined.
RL_INLINE void dequantize_block(WeightKind kind, const uint8_t* p, float* out) {
  const float d = f16_to_f32(u16_at(p));
  const bool has_min = kind == WeightKind::kQ4_1 || kind == WeightKind::kQ5_1;
  const bool five = kind == WeightKind::kQ5_0 || kind == WeightKind::kQ5_1;
  const float m = has_min ? f16_to_f32(u16_at(p + 2)) : 0.0f;
  const uint8_t* qs = p + (has_min ? 4 : 2);
  uint32_t fifth = 0;
  if (five) {
    memcpy(&fifth, qs, 4);
    qs += 4;
  }
  for (int i = 0; i < 32; ++i) {
    int q;
    if (kind == WeightKind::kQ8_0) {
      q = static_cast<int8_t>(qs[i]);
    } else {
      q = nibble(qs, i) | static_cast<int>(((fifth >> i) & 1u) << 4);
      if (kind == WeightKind::kQ4_0) q -= 8;
      if (kind == WeightKind::kQ5_0) q -= 16;
    }
    const float y = d * static_cast<float>(q);
    out[i] = has_min ? y + m : y;
  }
}

RL_INLINE void embed_row(const EmbeddingArgs& a, const uint8_t* row, float* out) {
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  if (a.kind == WeightKind::kF32) {
    memcpy(out, row, static_cast<size_t>(a.k) * 4);
  } else if (a.kind == WeightKind::kF16) {
    for (int i = 0; i < a.k; ++i) out[i] = f16_to_f32(halves[i]);
  } else if (a.kind == WeightKind::kBF16) {
    for (int i = 0; i < a.k; ++i) out[i] = bf16_to_f32(halves[i]);
  } else {
    const size_t block_bytes = row_bytes(a.kind, 32);
    for (int b = 0; b < a.k / 32; ++b) dequantize_block(a.kind, row + static_cast<size_t>(b) * block_bytes, out + b * 32);
  }
}

void embedding(const void* p, Worker& w) {
  const auto& a = *static_cast<const EmbeddingArgs*>(p);
  const Range r = w.share(a.rows.get());
  for (int t = r.begin; t < r.end; ++t) {
    float* out = a.out + static_cast<ptrdiff_t>(t) * a.k;
    const int id = a.ids[t];
    if (id < 0 || id >= a.vocab) {
      fill_nan(out, a.k);
    } else {
      embed_row(a, a.table + static_cast<size_t>(id) * row_bytes(a.kind, a.k), out);
    }
  }
}
ROOTLET_OP(embedding);

// ---- norms

void rms_norm(const void* p, Worker& w) {
  const auto& a = *static_cast<const NormArgs*>(p);
  if (a.q) {
    const Range r = w.share(a.rows.get());
    return norm_and_quantize(a, r.begin, r.end, static_cast<float*>(w.scratch(sizeof(float) * static_cast<size_t>(a.n))));
  }
  const Range r = w.share(a.rows.get() * a.heads);
  for (int u = r.begin; u < r.end; ++u) {
    norm_row(a.x + u / a.heads * a.x_stride + u % a.heads * a.n, a.weight, a.n, a.eps, a.out + static_cast<ptrdiff_t>(u) * a.n);
  }
}
ROOTLET_OP(rms_norm);

void rope(const void* p, Worker& w) {
  const auto& a = *static_cast<const RopeArgs*>(p);
  const Range r = w.share(a.rows.get() * a.heads);
  for (int u = r.begin; u < r.end; ++u) rotate_head(a, u);
}
ROOTLET_OP(rope);

// ---- elementwise

void silu_and_mul(const void* p, Worker& w) {
  const auto& a = *static_cast<const SiluArgs*>(p);
  const int pieces = (a.n + kPiece - 1) / kPiece;
  const Range r = w.share(a.rows.get() * pieces);
  for (int u = r.begin; u < r.end; ++u) {
    const int t = u / pieces, begin = u % pieces * kPiece, count = smaller(a.n - begin, kPiece);
    const ptrdiff_t at = static_cast<ptrdiff_t>(t) * a.n + begin;
    const float* gate = a.x + t * a.x_stride + begin;
    const float* up = gate + a.n;
    float product[kPiece];
    float* out = a.out ? a.out + at : product;
    for (int i = 0; i < count; i += 8) {
      const int n = smaller(count - i, 8);
      store_n(out + i, mul(silu8(load_n(gate + i, n)), load_n(up + i, n)), n);
    }
    if (a.q) quantize_row(out, count, a.q + at, a.scales + at / kQuantBlock);
  }
}
ROOTLET_OP(silu_and_mul);

void gather_rows(const void* p, Worker& w) {
  const auto& a = *static_cast<const GatherArgs*>(p);
  const Range r = w.share(a.rows.get());
  for (int t = r.begin; t < r.end; ++t) {
    float* out = a.out + static_cast<ptrdiff_t>(t) * a.n;
    const int row = a.index[t];
    if (row < 0 || row >= a.num_source_rows) {
      fill_nan(out, a.n);
    } else {
      memcpy(out, a.x + row * a.x_stride, static_cast<size_t>(a.n) * sizeof(float));
    }
  }
}
ROOTLET_OP(gather_rows);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
