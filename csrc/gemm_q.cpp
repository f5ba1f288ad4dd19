// Linear layers with quantised weights: int8 activations per block of 32, exact integer dot products, blocks summed in ascending order.
//
// Tiles of up to 4x16 or 6x32 (gemm_q_X.h), cut by tile_loop.h. Memory traffic: 4.5 to 8.5 bits a weight, once for each row tile (from cache, or
// prefetched). Roofline: at few rows the memory bus (0.625 B a MAC for q4_1), then the multipliers: on two threads of AVX2 from 8 rows on, of AVX-512
// with VNNI from about 10 on.
#include <cstring>

#include "rootlet/block_scale.h"
#include "rootlet/dispatch.h"
#include "rootlet/fused_linear.h"
#include "rootlet/quant_formats.h"
#include "rootlet/tile_loop.h"
#if defined(__AVX512VNNI__)
#include "rootlet/gemm_q_avx512.h"
#else
#if defined(__AVX2__)
#include "rootlet/gemm_q_avx2.h"
#elif defined(ROOTLET_NEON)
#include "rootlet/gemm_q_neon.h"
#else
#include "rootlet/gemm_q_scalar.h"
#endif
#include "rootlet/gemm_q_blocks.h"
#endif

namespace rootlet::ROOTLET_ISA {
namespace {

template <class F>
struct QuantKernel {
  static constexpr WeightKind kKind = F::kKind;
  static constexpr int kColumns = kUnitColumns;

  static int num_steps(const LinearArgs& a) { return a.k / kQuantBlock * kBlockSteps; }

  template <int R>
  RL_INLINE void tile(const LinearArgs& a, const uint8_t* w, int row, Prefetch pf, float (*acc)[kColumns]) {
    quant_tile<F, R>(a, w, row, pf, acc);
  }
};

ROOTLET_OP_AS("gemm_q4_0", run_quant_linear<QuantKernel<Q4_0>>, gemm_q4_0);
ROOTLET_OP_AS("gated_q4_0", run_gated<QuantKernel<Q4_0>>, gated_q4_0);
ROOTLET_OP_AS("gemm_q4_1", run_quant_linear<QuantKernel<Q4_1>>, gemm_q4_1);
ROOTLET_OP_AS("gated_q4_1", run_gated<QuantKernel<Q4_1>>, gated_q4_1);
ROOTLET_OP_AS("gemm_q5_0", run_quant_linear<QuantKernel<Q5_0>>, gemm_q5_0);
ROOTLET_OP_AS("gated_q5_0", run_gated<QuantKernel<Q5_0>>, gated_q5_0);
ROOTLET_OP_AS("gemm_q5_1", run_quant_linear<QuantKernel<Q5_1>>, gemm_q5_1);
ROOTLET_OP_AS("gated_q5_1", run_gated<QuantKernel<Q5_1>>, gated_q5_1);
ROOTLET_OP_AS("gemm_q8_0", run_quant_linear<QuantKernel<Q8_0>>, gemm_q8_0);
ROOTLET_OP_AS("gated_q8_0", run_gated<QuantKernel<Q8_0>>, gated_q8_0);

void quantize(const void* p, Worker& w) {
  const auto& a = *static_cast<const QuantizeArgs*>(p);
  const int blocks = a.k / kQuantBlock;
  const int pieces = a.low ? 1 : blocks;  // of a row
  const Range r = w.share(a.rows.get() * pieces);
  for (int i = r.begin; i < r.end; ++i) {
    const float* x = a.x + i / pieces * a.x_stride + i % pieces * kQuantBlock;
    const ptrdiff_t at = static_cast<ptrdiff_t>(i) * (blocks / pieces);
    int8_t* q = a.q + at * kQuantBlock;
    if (a.low) {
      quantize_row(x, a.k, q, a.low + at * kQuantBlock, a.scales + at);
    } else {
      quantize_row(x, kQuantBlock, q, a.scales + at);
    }
  }
}
ROOTLET_OP(quantize);

// 16 bytes of nibbles (file order: low nibbles are k 0-15, high ones 16-31) of column `lane / 4` -> one dword in each of the 4 vector pairs.
RL_INLINE void pack_nibbles(const uint8_t* source, uint8_t* out, int lane) {
  uint32_t u[4];
  memcpy(u, source, 16);
  for (int j = 0; j < 4; ++j) {
    const uint32_t first = j < 2 ? u[2 * j] : u[2 * j - 4] >> 4;
    const uint32_t second = j < 2 ? u[2 * j + 1] : u[2 * j - 3] >> 4;
    const uint32_t dword = (first & 0x0f0f0f0fu) | ((second & 0x0f0f0f0fu) << 4);
    memcpy(out + j * 64 + lane, &dword, 4);
  }
}

// 32 fifth bits in k order -> 4 bytes: byte i holds, at bit g, the bit of k = 4g + i.
RL_INLINE void pack_fifth_bits(const uint8_t* source, uint8_t* out) {
  uint32_t bits;
  memcpy(&bits, source, 4);
  for (int i = 0; i < 4; ++i) {
    uint32_t byte = 0;
    for (int g = 0; g < 8; ++g) byte |= ((bits >> (4 * g + i)) & 1u) << g;
    out[i] = static_cast<uint8_t>(byte);
  }
}

template <class F>
RL_INLINE void pack_block(const uint8_t* source, uint8_t* out, int c) {
  const int lane = (c / 8) * 32 + (c % 8) * 4;
  memcpy(out + F::kScales + c * 2, source, 2);
  source += 2;
  if (F::kMin) {
    memcpy(out + F::kMinima + c * 2, source, 2);
    source += 2;
  }
  if (F::kBits == 5) {
    pack_fifth_bits(source, out + F::kHigh + lane);
    source += 4;
  }
  if (F::kBits == 8) {
    for (int g = 0; g < 8; ++g) memcpy(out + g * 64 + lane, source + g * 4, 4);
  } else {
    pack_nibbles(source, out, lane);
  }
}

template <class F>
void pack_quant(const void* p, Worker& w) {
  const auto& a = *static_cast<const PackArgs*>(p);
  const int blocks = a.k / kQuantBlock;
  const size_t source_row = row_bytes(F::kKind, a.k), source_block = source_row / static_cast<size_t>(blocks), bytes = unit_bytes(F::kKind, a.k);
  const Range units = w.share(num_units(F::kKind, a.n));
  for (int u = units.begin; u < units.end; ++u) {
    uint8_t* out = a.packed + static_cast<size_t>(u) * bytes;
    const int cols = a.n - u * kUnitColumns < kUnitColumns ? a.n - u * kUnitColumns : kUnitColumns;
    if (cols < kUnitColumns) memset(out, 0, bytes);
    for (int b = 0; b < blocks; ++b, out += F::kUnitBytes) {
      for (int c = 0; c < cols; ++c) {
        const uint8_t* row = a.source + static_cast<size_t>(u * kUnitColumns + c) * source_row;
        pack_block<F>(row + static_cast<size_t>(b) * source_block, out + c / kGroupColumns * F::kBytes, c % kGroupColumns);
      }
    }
  }
}

ROOTLET_OP_AS("pack_q4_0", pack_quant<Q4_0>, pack_q4_0);
ROOTLET_OP_AS("pack_q4_1", pack_quant<Q4_1>, pack_q4_1);
ROOTLET_OP_AS("pack_q5_0", pack_quant<Q5_0>, pack_q5_0);
ROOTLET_OP_AS("pack_q5_1", pack_quant<Q5_1>, pack_q5_1);
ROOTLET_OP_AS("pack_q8_0", pack_quant<Q8_0>, pack_q8_0);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
