// Linear layers with float weights (f32, f16, bf16), and the packing of all kinds.
//
// Packed: [group][k][16 columns]. Tile 4x16: 8 accumulators, 2 weight vectors, 1 broadcast; one fma for each k in ascending order for each output, so
// bits do not depend on the tile. Roofline: 16 columns x bytes per k are read once for each 4 rows; from 4 rows on (f32) the FMA units are the limit.
#include <cstring>

#include "rootlet/dispatch.h"
#include "rootlet/tile_loop.h"

namespace rootlet::ROOTLET_ISA {
namespace {

struct F32 {
  static constexpr WeightKind kKind = WeightKind::kF32;
  using Stored = float;
  RL_INLINE f32x8 widen(const float* p) { return load(p); }
};

struct F16 {
  static constexpr WeightKind kKind = WeightKind::kF16;
  using Stored = uint16_t;
  RL_INLINE f32x8 widen(const uint16_t* p) { return load_f16(p); }
};

struct BF16 {
  static constexpr WeightKind kKind = WeightKind::kBF16;
  using Stored = uint16_t;
  RL_INLINE f32x8 widen(const uint16_t* p) { return load_bf16(p); }
};

template <class F>
struct FloatKernel {
  static constexpr int kStep = 8;  // k between two prefetches
  static constexpr WeightKind kKind = F::kKind;
  static constexpr int kColumns = kGroupColumns;

  static int num_steps(const LinearArgs& a) { return (a.k + kStep - 1) / kStep; }

  template <int R>
  static __attribute__((noinline)) void tile(const LinearArgs& a, const uint8_t* weights, int row, Prefetch pf, float (*acc)[kColumns]) {
    const auto* w = reinterpret_cast<const typename F::Stored*>(weights);
    const float* x[R];
    f32x8 lo[R], hi[R];
    for (int r = 0; r < R; ++r) {
      x[r] = a.x + (row + r) * a.x_stride;
      lo[r] = hi[r] = set1(0.0f);
    }
    for (int k = 0; k < a.k; ++k, w += kGroupColumns) {
      if (k % kStep == 0) fetch(pf);
      const f32x8 w_lo = F::widen(w), w_hi = F::widen(w + 8);
      for (int r = 0; r < R; ++r) {
        const f32x8 b = set1(x[r][k]);
        lo[r] = fma(w_lo, b, lo[r]);
        hi[r] = fma(w_hi, b, hi[r]);
      }
    }
    for (int r = 0; r < R; ++r) {
      store(acc[r], lo[r]);
      store(acc[r] + 8, hi[r]);
    }
  }
};

ROOTLET_OP_AS("gemm_f32", run_linear<FloatKernel<F32>>, gemm_f32);
ROOTLET_OP_AS("gemm_f16", run_linear<FloatKernel<F16>>, gemm_f16);
ROOTLET_OP_AS("gemm_bf16", run_linear<FloatKernel<BF16>>, gemm_bf16);

template <class T>
void pack_float_group(const PackArgs& a, int group, uint8_t* packed) {
  T* out = reinterpret_cast<T*>(packed);
  for (int c = 0; c < kGroupColumns; ++c) {
    const int n = group * kGroupColumns + c;
    const uint8_t* row = a.source + static_cast<size_t>(n) * static_cast<size_t>(a.k) * sizeof(T);
    for (int k = 0; k < a.k; ++k) {
      T value = 0;
      if (n < a.n) memcpy(&value, row + static_cast<size_t>(k) * sizeof(T), sizeof(T));
      out[static_cast<size_t>(k) * kGroupColumns + static_cast<size_t>(c)] = value;
    }
  }
}

void pack_float(const void* p, Worker& w) {
  const auto& a = *static_cast<const PackArgs*>(p);
  const size_t bytes = group_bytes(a.kind, a.k);
  const Range groups = w.share((a.n + kGroupColumns - 1) / kGroupColumns);
  for (int g = groups.begin; g < groups.end; ++g) {
    uint8_t* out = a.packed + static_cast<size_t>(g) * bytes;
    if (a.kind == WeightKind::kF32) {
      pack_float_group<uint32_t>(a, g, out);
    } else {
      pack_float_group<uint16_t>(a, g, out);
    }
  }
}
ROOTLET_OP(pack_float);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
