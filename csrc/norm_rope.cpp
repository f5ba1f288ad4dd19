// Embedding, norms, rotary embedding, activation, add, gather. Each row is reduced in 16 lanes (element i in lane i % 16, ascending), then in one
// fixed tree. All are memory-light next to the matrix products: rows, or pieces of rows, are split statically.
#include <cmath>
#include <cstring>

#include "rootlet/dispatch.h"
#include "rootlet/elementwise.h"
#include "rootlet/linear.h"
#include "rootlet/math.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kPiece = 256;  // elements of a row that one thread takes at once in elementwise ops

RL_INLINE int smaller(int a, int b) { return a < b ? a : b; }

RL_INLINE void fill_nan(float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = float_of(0x7fc00000u);
}

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

RL_INLINE float sum_of_squares(const float* x, int n) {
  f32x8 lo = set1(0.0f), hi = set1(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x8 a = load(x + i), b = load(x + i + 8);
    lo = fma(a, a, lo);
    hi = fma(b, b, hi);
  }
  if (i < n) {
    const f32x8 a = load_n(x + i, smaller(n - i, 8));
    lo = fma(a, a, lo);
  }
  if (i + 8 < n) {
    const f32x8 b = load_n(x + i + 8, n - i - 8);
    hi = fma(b, b, hi);
  }
  return hsum(add(lo, hi));
}

// x * rsqrt(mean(x^2) + eps) * weight
void rms_norm(const void* p, Worker& w) {
  const auto& a = *static_cast<const NormArgs*>(p);
  const Range r = w.share(a.rows.get() * a.heads);
  for (int u = r.begin; u < r.end; ++u) {
    const float* x = a.x + u / a.heads * a.x_stride + u % a.heads * a.n;
    float* out = a.out + static_cast<ptrdiff_t>(u) * a.n;
    const float mean = sum_of_squares(x, a.n) / static_cast<float>(a.n);
    const f32x8 scale = set1(1.0f / std::sqrt(mean + a.eps));
    for (int i = 0; i < a.n; i += 8) {
      const int n = smaller(a.n - i, 8);
      store_n(out + i, mul(mul(load_n(x + i, n), scale), load_n(a.weight + i, n)), n);
    }
  }
}
ROOTLET_OP(rms_norm);

// ---- rope

RL_INLINE void rotate_halves(const float* x, const float* cos, const float* sin, int half, float* out) {
  for (int i = 0; i < half; i += 8) {
    const int n = smaller(half - i, 8);
    const f32x8 a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(out + i, fma(a, c, neg(mul(b, s))), n);
    store_n(out + half + i, fma(b, c, mul(a, s)), n);
  }
}

RL_INLINE void rotate_pairs(const float* x, const float* cos, const float* sin, int half, float* out) {
  for (int i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = fma1(a, cos[i], -(b * sin[i]));
    out[2 * i + 1] = fma1(b, cos[i], a * sin[i]);
  }
}

void rope(const void* p, Worker& w) {
  const auto& a = *static_cast<const RopeArgs*>(p);
  const int half = a.rotary_dim / 2;
  const Range r = w.share(a.rows.get() * a.heads);
  for (int u = r.begin; u < r.end; ++u) {
    const int t = u / a.heads, position = a.positions[t];
    const float* x = a.x + t * a.x_stride + u % a.heads * a.head_dim;
    float* out = a.out + static_cast<ptrdiff_t>(u) * a.head_dim;
    if (position < 0 || position >= a.max_len) {
      fill_nan(out, a.head_dim);
      continue;
    }
    const float* cos = a.cos_sin + static_cast<ptrdiff_t>(position) * a.rotary_dim;
    if (a.interleaved) {
      rotate_pairs(x, cos, cos + half, half, out);
    } else {
      rotate_halves(x, cos, cos + half, half, out);
    }
    for (int i = a.rotary_dim; i < a.head_dim; ++i) out[i] = x[i];
  }
}
ROOTLET_OP(rope);

// ---- elementwise

// Calls piece(row, first element, count) for this worker's pieces of a [rows, n] output.
template <class Piece>
RL_INLINE void for_pieces(Worker& w, int rows, int n, const Piece& piece) {
  const int pieces = (n + kPiece - 1) / kPiece;
  const Range r = w.share(rows * pieces);
  for (int u = r.begin; u < r.end; ++u) {
    const int begin = u % pieces * kPiece;
    piece(u / pieces, begin, smaller(n - begin, kPiece));
  }
}

void silu_and_mul(const void* p, Worker& w) {
  const auto& a = *static_cast<const SiluArgs*>(p);
  for_pieces(w, a.rows.get(), a.n, [&](int t, int begin, int count) {
    const float* gate = a.x + t * a.x_stride + begin;
    const float* up = gate + a.n;
    float* out = a.out + static_cast<ptrdiff_t>(t) * a.n + begin;
    for (int i = 0; i < count; i += 8) {
      const int n = smaller(count - i, 8);
      store_n(out + i, mul(silu8(load_n(gate + i, n)), load_n(up + i, n)), n);
    }
  });
}
ROOTLET_OP(silu_and_mul);

void add_rows(const void* p, Worker& w) {
  const auto& a = *static_cast<const AddArgs*>(p);
  for_pieces(w, a.rows.get(), a.n, [&](int t, int begin, int count) {
    const float* x = a.x + t * a.x_stride + begin;
    const float* y = a.y + t * a.y_stride + begin;
    float* out = a.out + static_cast<ptrdiff_t>(t) * a.n + begin;
    for (int i = 0; i < count; i += 8) {
      const int n = smaller(count - i, 8);
      store_n(out + i, add(load_n(x + i, n), load_n(y + i, n)), n);
    }
  });
}
ROOTLET_OP_AS("add", add_rows, add);

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
