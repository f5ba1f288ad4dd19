// Argument blocks of the linear layer: packing at load, activation quantisation, matrix product. Design: 16 output columns form a group, and one or two
// groups a unit, whose weights are one sequential stream that is read once for each tile of a few rows.
#pragma once
#include "rootlet/elementwise.h"

namespace rootlet {

// Packed bytes of one block (32 k) of a 16-column group. Layouts: gemm_q.cpp.
RL_SHARED constexpr int packed_block_bytes(WeightKind kind) {
  switch (kind) {
    case WeightKind::kF32: return 32 * 16 * 4;
    case WeightKind::kF16:
    case WeightKind::kBF16: return 32 * 16 * 2;
    case WeightKind::kQ4_0: return 256 + 32;
    case WeightKind::kQ4_1: return 256 + 64;
    case WeightKind::kQ5_0: return 256 + 64 + 32;
    case WeightKind::kQ5_1: return 256 + 64 + 64;
    case WeightKind::kQ8_0: return 512 + 32;
    default: return 0;
  }
}

// Bytes of one row of K values as the file stores it (K % 32 == 0 for block types).
RL_SHARED constexpr size_t row_bytes(WeightKind kind, int k) {
  const size_t blocks = static_cast<size_t>(k) / 32;
  switch (kind) {
    case WeightKind::kF32: return static_cast<size_t>(k) * 4;
    case WeightKind::kF16:
    case WeightKind::kBF16: return static_cast<size_t>(k) * 2;
    case WeightKind::kQ4_0: return blocks * 18;
    case WeightKind::kQ4_1: return blocks * 20;
    case WeightKind::kQ5_0: return blocks * 22;
    case WeightKind::kQ5_1: return blocks * 24;
    case WeightKind::kQ8_0: return blocks * 34;
    default: return 0;
  }
}

RL_SHARED constexpr bool is_block_kind(WeightKind kind) { return kind >= WeightKind::kQ4_0; }

RL_SHARED constexpr size_t group_bytes(WeightKind kind, int k) {
  return is_block_kind(kind) ? static_cast<size_t>(k) / 32 * packed_block_bytes(kind) : row_bytes(kind, k) * kGroupColumns;
}

// Groups whose weights are packed alternately, block by block, for tiles that are as wide.
RL_SHARED constexpr int unit_groups(WeightKind kind) { return is_block_kind(kind) ? 2 : 1; }

RL_SHARED constexpr int unit_columns(WeightKind kind) { return unit_groups(kind) * kGroupColumns; }

RL_SHARED constexpr size_t unit_bytes(WeightKind kind, int k) { return group_bytes(kind, k) * static_cast<size_t>(unit_groups(kind)); }

RL_SHARED constexpr int num_units(WeightKind kind, int n) { return (n + unit_columns(kind) - 1) / unit_columns(kind); }

struct PackArgs {
  WeightKind kind;
  int32_t n, k;
  const uint8_t* source;  // [n, row_bytes]
  uint8_t* packed;        // [num_units, unit_bytes]; columns past n are zero
};

struct QuantizeArgs {
  Count rows;
  int32_t k;
  const float* x;
  ptrdiff_t x_stride;
  int8_t* q;         // [rows, k]
  int8_t* low;       // [rows, k]: the second plane of blocks that stand out (quantize.h), or null
  ActScale* scales;  // [rows, k / 32]
};

struct LinearArgs {
  Count rows;
  int32_t n, k;
  const uint8_t* packed;
  const float* x;  // float weights read x; block weights read q, low (or null) and scales
  ptrdiff_t x_stride;
  const int8_t* q;
  const int8_t* low;
  const ActScale* scales;
  const float* bias;      // [n] or null
  const float* residual;  // [rows, n] or null
  ptrdiff_t residual_stride;
  float* out;     // [rows, n]
  NormArgs norm;  // x null, or the norm that makes q, low and scales: the op begins with it
};

// silu(gate) * up of a linear whose outputs are [gate, up], left in int8 blocks. Neither the linear's floats nor the product's are stored unless asked.
struct GatedArgs {
  LinearArgs linear;  // n = 2F, F a multiple of 32; no residual; out [rows, 2F] or null
  float* out;         // [rows, F] or null
  int8_t* q;          // [rows, F]
  ActScale* scales;   // [rows, F / 32]
};

}  // namespace rootlet
