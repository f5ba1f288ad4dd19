// The quantised tile on AVX-512 with VNNI. Meaning: gemm_q_scalar.h.
//
// The 16 columns of a k-group are one register, and vpdpbusd adds 4 unsigned x signed products to each int32: 8 instructions a row, group and block.
// A tile is two groups wide, so that an activation is broadcast once for two multiplies: with one group the loads are the limit (2 a cycle), not the
// multipliers. Weights are made unsigned (8-bit: w + 128) and the surplus, zero * sum(q), is taken off at the start: all exact.
// Registers at R = 6: 12 integer and 12 float accumulators, 4 weights, 1 broadcast, 1 mask of 32. Limit: multiply-adds, integer and float, share two
// ports; a row, group and block is 8 + 3 of them (8 + 2 without minima), so 73 % (80 %) of what vpdpbusd alone would do.
#pragma once
#include <immintrin.h>

#include "rootlet/quant_formats.h"
#include "rootlet/tile_input.h"
#include "rootlet/tile_loop.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kBlockSteps = 4;  // prefetches are spread over a block: a burst of 10 to 17 lines holds the loads behind it up

RL_INLINE __m512i four_k(const int8_t* q) {
  int32_t dword;
  __builtin_memcpy(&dword, q, 4);
  return _mm512_set1_epi32(dword);
}

// One k-group of all rows: isum[r][g] += w[g] . q[r].
template <int R>
RL_INLINE void accumulate(const __m512i (&w)[kUnitGroups], const int8_t* q, ptrdiff_t q_stride, __m512i (&isum)[R][kUnitGroups]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const __m512i x = four_k(q + r * q_stride);
#pragma GCC unroll 2
    for (int g = 0; g < kUnitGroups; ++g) isum[r][g] = _mm512_dpbusd_epi32(isum[r][g], w[g], x);
  }
}

// Fifth bits of k-group g, moved to bit 4 of each byte.
template <int G>
RL_INLINE __m512i fifth_bit(__m512i bits) {
  const __m512i moved = G < 4 ? _mm512_slli_epi16(bits, G < 4 ? 4 - G : 0) : _mm512_srli_epi16(bits, G < 4 ? 0 : G - 4);
  return _mm512_and_si512(moved, _mm512_set1_epi8(16));
}

// k-group K of both groups: a nibble of each byte, and its fifth bit. The register pressure is highest here: each k-group loads its bytes anew.
template <class F, int R, int K>
RL_INLINE void nibbles(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, __m512i (&isum)[R][kUnitGroups]) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i v[kUnitGroups];
#pragma GCC unroll 2
  for (int g = 0; g < kUnitGroups; ++g) {
    const uint8_t* at = w + g * F::kBytes;
    v[g] = _mm512_loadu_si512(at + K / 2 * 64);
    v[g] = _mm512_and_si512(K % 2 ? _mm512_srli_epi16(v[g], 4) : v[g], mask);
    if constexpr (F::kBits == 5) v[g] = _mm512_or_si512(v[g], fifth_bit<K>(_mm512_loadu_si512(at + F::kHigh)));
  }
  accumulate<R>(v, q + K * 4, q_stride, isum);
}

// k-group K of both groups, as unsigned bytes.
template <class F, int R, int K>
RL_INLINE void bytes(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, __m512i (&isum)[R][kUnitGroups]) {
  __m512i v[kUnitGroups];
#pragma GCC unroll 2
  for (int g = 0; g < kUnitGroups; ++g) v[g] = _mm512_xor_si512(_mm512_loadu_si512(w + g * F::kBytes + K * 64), _mm512_set1_epi8(-128));
  accumulate<R>(v, q + K * 4, q_stride, isum);
}

// The 8 values of k from 8 J on.
template <class F, int R, int J>
RL_INLINE void quarter_dot(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, __m512i (&isum)[R][kUnitGroups]) {
  if constexpr (F::kBits == 8) {
    bytes<F, R, 2 * J>(w, q, q_stride, isum);
    bytes<F, R, 2 * J + 1>(w, q, q_stride, isum);
  } else {
    nibbles<F, R, 2 * J>(w, q, q_stride, isum);
    nibbles<F, R, 2 * J + 1>(w, q, q_stride, isum);
  }
}

// isum = (isum << low_bits) + w . low, less the surplus.
template <class F, int R>
RL_INLINE void add_low(const uint8_t* w, const TileInput& in, int surplus, __m512i (&isum)[R][kUnitGroups]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const __m128i bits = _mm_cvtsi32_si128(in.scale(r).low_bits);
    const __m512i less = _mm512_set1_epi32(surplus * in.scale(r).low_sum);
#pragma GCC unroll 2
    for (int g = 0; g < kUnitGroups; ++g) {
      isum[r][g] = _mm512_sub_epi32(_mm512_sll_epi32(isum[r][g], bits), less);
      asm volatile("" : "+v"(isum[r][g]));
    }
  }
  asm volatile("" : "+r"(w));  // load the weights again: kept from the first plane they would be spilled
  quarter_dot<F, R, 0>(w, in.low(), in.k, isum);
  quarter_dot<F, R, 1>(w, in.low(), in.k, isum);
  quarter_dot<F, R, 2>(w, in.low(), in.k, isum);
  quarter_dot<F, R, 3>(w, in.low(), in.k, isum);
}

// y[r][g] = fma(isum, d_w * d_a, y), then fma(m_w, d_sum, y).
template <class F, int R>
RL_INLINE void add_block(const uint8_t* w, const TileInput& in, const __m512i (&isum)[R][kUnitGroups],
                         __m512 (&y)[R][kUnitGroups]) {
  __m512 d[kUnitGroups], m[kUnitGroups];
#pragma GCC unroll 2
  for (int g = 0; g < kUnitGroups; ++g) {
    const auto* at = reinterpret_cast<const __m256i*>(w + g * F::kBytes + F::kScales);
    d[g] = _mm512_cvtph_ps(_mm256_loadu_si256(at));
    m[g] = F::kMin ? _mm512_cvtph_ps(_mm256_loadu_si256(at + 1)) : d[g];
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const ActScale& scale = in.scale(r);
    const __m512 d_a = _mm512_set1_ps(scale.d), d_sum = _mm512_set1_ps(scale.d_sum);
#pragma GCC unroll 2
    for (int g = 0; g < kUnitGroups; ++g) {
      y[r][g] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum[r][g]), _mm512_mul_ps(d[g], d_a), y[r][g]);
      if (F::kMin) y[r][g] = _mm512_fmadd_ps(m[g], d_sum, y[r][g]);
    }
  }
}

template <class F, int R>
__attribute__((noinline)) void quant_tile(const LinearArgs& a, const uint8_t* w, int row, Prefetch pf, float (*acc)[kUnitColumns]) {
  constexpr int kSurplus = F::kBits == 8 ? 128 : F::kZero;
  const int blocks = a.k / kQuantBlock;
  TileInput in(a, row);
  unsigned marks = 0;
  __m512 y[R][kUnitGroups];
  for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b, w += F::kUnitBytes, in.next()) {
    marks = b % kMarked ? marks >> 1 : in.stand_out<R>();
    __m512i isum[R][kUnitGroups];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) isum[r][0] = isum[r][1] = _mm512_set1_epi32(-kSurplus * in.scale(r).sum);
    fetch_part<F::kUnitBytes, 0, kBlockSteps>(pf, w);
    quarter_dot<F, R, 0>(w, in.q, in.k, isum);
    fetch_part<F::kUnitBytes, 1, kBlockSteps>(pf, w);
    quarter_dot<F, R, 1>(w, in.q, in.k, isum);
    fetch_part<F::kUnitBytes, 2, kBlockSteps>(pf, w);
    quarter_dot<F, R, 2>(w, in.q, in.k, isum);
    fetch_part<F::kUnitBytes, 3, kBlockSteps>(pf, w);
    quarter_dot<F, R, 3>(w, in.q, in.k, isum);
    // Expected, so that it lies inside the loop: put behind the function by GCC, it costs a spilled sum.
    if (__builtin_expect(marks & 1, true)) add_low<F, R>(w, in, kSurplus, isum);
    add_block<F, R>(w, in, isum, y);
  }
  for (int r = 0; r < R; ++r) {
    _mm512_store_ps(acc[r], y[r][0]);
    _mm512_store_ps(acc[r] + kGroupColumns, y[r][1]);
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
