// The quantised tile on AVX-512 with VNNI. Meaning: gemm_q_scalar.h.
//
// The 16 columns of a k-group are one register, and vpdpbusd adds 4 unsigned x signed products to each int32: 8 instructions a row and block, with the
// activations as memory broadcasts. Weights are made unsigned (8-bit: w + 128) and the surplus, zero * sum(q), is taken off at the start: all exact.
// Registers at R = 8: 8 integer and 8 float accumulators, 3 weights, 2 masks of 32. Limit: 2 vpdpbusd a cycle.
#pragma once
#include <immintrin.h>

#include "rootlet/quant_formats.h"
#include "rootlet/tile_loop.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE __m512i four_k(const int8_t* q) {
  int32_t dword;
  __builtin_memcpy(&dword, q, 4);
  return _mm512_set1_epi32(dword);
}

template <int R>
RL_INLINE void accumulate(__m512i w, const int8_t* q, ptrdiff_t q_stride, __m512i* isum) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) isum[r] = _mm512_dpbusd_epi32(isum[r], w, four_k(q + r * q_stride));
}

// Fifth bits of k-group g, moved to bit 4 of each byte.
template <int G>
RL_INLINE __m512i fifth_bit(__m512i bits) {
  const __m512i moved = G < 4 ? _mm512_slli_epi16(bits, G < 4 ? 4 - G : 0) : _mm512_srli_epi16(bits, G < 4 ? 0 : G - 4);
  return _mm512_and_si512(moved, _mm512_set1_epi8(16));
}

template <class F, int R, int J>
RL_INLINE void nibble_pair(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, __m512i* isum) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i v = _mm512_loadu_si512(w + J * 64);
  __m512i low = _mm512_and_si512(v, mask), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
  if constexpr (F::kBits == 5) {
    const __m512i fifth = _mm512_loadu_si512(w + F::kHigh);
    low = _mm512_or_si512(low, fifth_bit<2 * J>(fifth));
    high = _mm512_or_si512(high, fifth_bit<2 * J + 1>(fifth));
  }
  accumulate<R>(low, q + J * 8, q_stride, isum);
  accumulate<R>(high, q + J * 8 + 4, q_stride, isum);
}

template <class F, int R>
RL_INLINE void block_dot(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, __m512i* isum) {
  if constexpr (F::kBits == 8) {
    const __m512i sign = _mm512_set1_epi8(-128);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) accumulate<R>(_mm512_xor_si512(_mm512_loadu_si512(w + g * 64), sign), q + g * 4, q_stride, isum);
  } else {
    nibble_pair<F, R, 0>(w, q, q_stride, isum);
    nibble_pair<F, R, 1>(w, q, q_stride, isum);
    nibble_pair<F, R, 2>(w, q, q_stride, isum);
    nibble_pair<F, R, 3>(w, q, q_stride, isum);
  }
}

template <class F, int R>
__attribute__((noinline)) void quant_tile(const LinearArgs& a, const uint8_t* w, int row, Prefetch pf, float (*acc)[kGroupColumns]) {
  constexpr int kSurplus = F::kBits == 8 ? 128 : F::kZero;
  const int blocks = a.k / kQuantBlock;
  const int8_t* q = a.q + static_cast<ptrdiff_t>(row) * a.k;
  const ActScale* s = a.scales + static_cast<ptrdiff_t>(row) * blocks;
  __m512 y[R];
  for (int r = 0; r < R; ++r) y[r] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b, w += F::kBytes, q += kQuantBlock, ++s) {
    fetch(pf);
    __m512i isum[R];
    for (int r = 0; r < R; ++r) isum[r] = _mm512_set1_epi32(-kSurplus * s[r * static_cast<ptrdiff_t>(blocks)].sum);
    block_dot<F, R>(w, q, a.k, isum);
    const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + F::kScales)));
    const __m512 m = F::kMin ? _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + F::kMinima))) : d;
    for (int r = 0; r < R; ++r) {
      const ActScale& scale = s[r * static_cast<ptrdiff_t>(blocks)];
      y[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum[r]), _mm512_mul_ps(d, _mm512_set1_ps(scale.d)), y[r]);
      if (F::kMin) y[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(scale.d_sum), y[r]);
    }
  }
  for (int r = 0; r < R; ++r) _mm512_store_ps(acc[r], y[r]);
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
