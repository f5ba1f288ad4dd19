// The quantised tile on AVX2. Meaning: gemm_q_scalar.h.
//
// A dword broadcast is 4 k of one row; maddubs(weights, broadcast) gives int16 pairs. |15 * 127 * 2| * 8 < 2^15, so a whole 4-bit block accumulates in
// int16; 5-bit blocks in two halves (31 * 127 * 2 * 4 < 2^15); 8-bit products (sign trick) widen at once. All of it is exact, so order is free.
// The low-nibble vectors serve all rows before the high ones: few live registers. The empty asm statements pin each accumulation where it stands;
// without them GCC hoists the products of a whole block and spills 25 of them (measured: 40 instead of 65-84 GMAC/s).
// Registers at R = 4: 8 int16 accumulators, 2 weights, mask, broadcast, 2 products. Float accumulators live in L1: one load and store a block.
#pragma once
#include <immintrin.h>

#include "rootlet/quant_formats.h"
#include "rootlet/simd.h"
#include "rootlet/tile_input.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

RL_INLINE __m256i four_k(const int8_t* q) {
  int32_t dword;
  __builtin_memcpy(&dword, q, 4);
  return _mm256_set1_epi32(dword);
}

// The k-group's two weight vectors times 4 k of each row, added to the int16 accumulators.
template <int R>
RL_INLINE void accumulate(__m256i w_lo, __m256i w_hi, const int8_t* q, ptrdiff_t q_stride, __m256i* lo, __m256i* hi) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m256i b = four_k(q + r * q_stride);
    lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(w_lo, b));
    hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(w_hi, b));
    asm volatile("" : "+x"(lo[r]), "+x"(hi[r]));
  }
}

// acc = fma(isum, d_w * d_a, acc), then the minimum; 8 columns.
template <class F>
RL_INLINE void scale_half(__m256i isum, const ActScale& s, __m256 d, __m256 m, float* acc) {
  __m256 y = _mm256_load_ps(acc);
  y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum), _mm256_mul_ps(d, _mm256_set1_ps(s.d)), y);
  if (F::kMin) y = _mm256_fmadd_ps(m, _mm256_set1_ps(s.d_sum), y);
  _mm256_store_ps(acc, y);
}

// Takes the surplus of unsigned weights off a sum of products.
template <class F>
RL_INLINE __m256i signed_sum(__m256i isum, int sum) {
  return F::kZero ? _mm256_sub_epi32(isum, _mm256_set1_epi32(F::kZero * sum)) : isum;
}

template <class F>
struct BlockScales {
  __m256 d_lo, d_hi, m_lo, m_hi;
  RL_INLINE BlockScales read(const uint8_t* w) {
    const auto* d = reinterpret_cast<const uint16_t*>(w + F::kScales);
    const auto* m = reinterpret_cast<const uint16_t*>(w + (F::kMin ? F::kMinima : F::kScales));
    return {load_f16(d).v, load_f16(d + 8).v, load_f16(m).v, load_f16(m + 8).v};
  }
};

// What becomes of a block's integer sums (of columns 0-7 and 8-15 in each row): scaled and added to the float accumulators...
template <class F, int R>
struct ToAcc {
  const uint8_t* w;
  const TileInput& in;
  float (*acc)[kUnitColumns];
  RL_SHARED void operator()(const __m256i* lo, const __m256i* hi) const {
    const auto c = BlockScales<F>::read(w);
    for (int r = 0; r < R; ++r) {
      const ActScale& s = in.scale(r);
      scale_half<F>(signed_sum<F>(lo[r], s.sum), s, c.d_lo, c.m_lo, acc[r]);
      scale_half<F>(signed_sum<F>(hi[r], s.sum), s, c.d_hi, c.m_hi, acc[r] + 8);
    }
  }
};

// ... or kept, shifted, until those of the second plane...
template <class F, int R>
struct ToSums {
  const TileInput& in;
  __m256i (*sums)[2];
  RL_SHARED void operator()(const __m256i* lo, const __m256i* hi) const {
    for (int r = 0; r < R; ++r) {
      const ActScale& s = in.scale(r);
      const __m128i bits = _mm_cvtsi32_si128(s.low_bits);
      sums[r][0] = _mm256_sll_epi32(signed_sum<F>(lo[r], s.sum), bits);
      sums[r][1] = _mm256_sll_epi32(signed_sum<F>(hi[r], s.sum), bits);
    }
  }
};

// ... are added to them.
template <class F, int R>
struct SumsToAcc {
  const uint8_t* w;
  const TileInput& in;
  const __m256i (*sums)[2];
  float (*acc)[kUnitColumns];
  RL_SHARED void operator()(const __m256i* lo, const __m256i* hi) const {
    const auto c = BlockScales<F>::read(w);
    for (int r = 0; r < R; ++r) {
      const ActScale& s = in.scale(r);
      scale_half<F>(_mm256_add_epi32(sums[r][0], signed_sum<F>(lo[r], s.low_sum)), s, c.d_lo, c.m_lo, acc[r]);
      scale_half<F>(_mm256_add_epi32(sums[r][1], signed_sum<F>(hi[r], s.low_sum)), s, c.d_hi, c.m_hi, acc[r] + 8);
    }
  }
};

template <class F, int R, class Sink>
RL_INLINE void block_4bit(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, const Sink& sink) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i lo[R], hi[R];
  for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m256i v_lo = load_bytes(w + j * 64), v_hi = load_bytes(w + j * 64 + 32);
    accumulate<R>(_mm256_and_si256(v_lo, mask), _mm256_and_si256(v_hi, mask), q + j * 8, q_stride, lo, hi);
    accumulate<R>(_mm256_and_si256(_mm256_srli_epi16(v_lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(v_hi, 4), mask), q + j * 8 + 4, q_stride, lo, hi);
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; ++r) {
    lo[r] = _mm256_madd_epi16(lo[r], ones);
    hi[r] = _mm256_madd_epi16(hi[r], ones);
  }
  sink(lo, hi);
}

// Fifth bits of k-group g, moved to bit 4 of each byte.
template <int G>
RL_INLINE __m256i fifth_bit(__m256i bits) {
  const __m256i moved = G < 4 ? _mm256_slli_epi16(bits, G < 4 ? 4 - G : 0) : _mm256_srli_epi16(bits, G < 4 ? 0 : G - 4);
  return _mm256_and_si256(moved, _mm256_set1_epi8(16));
}

template <class F, int R, int J>
RL_INLINE void pair_5bit(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, __m256i* lo, __m256i* hi) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i v_lo = load_bytes(w + J * 64), v_hi = load_bytes(w + J * 64 + 32);
  const __m256i h_lo = load_bytes(w + F::kHigh), h_hi = load_bytes(w + F::kHigh + 32);
  accumulate<R>(_mm256_or_si256(_mm256_and_si256(v_lo, mask), fifth_bit<2 * J>(h_lo)),
                _mm256_or_si256(_mm256_and_si256(v_hi, mask), fifth_bit<2 * J>(h_hi)), q + J * 8, q_stride, lo, hi);
  accumulate<R>(_mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(v_lo, 4), mask), fifth_bit<2 * J + 1>(h_lo)),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(v_hi, 4), mask), fifth_bit<2 * J + 1>(h_hi)), q + J * 8 + 4, q_stride, lo, hi);
}

template <class F, int R, class Sink>
RL_INLINE void block_5bit(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, const Sink& sink) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i lo[R], hi[R];
  alignas(32) __m256i half[R][2];
  for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
  pair_5bit<F, R, 0>(w, q, q_stride, lo, hi);
  pair_5bit<F, R, 1>(w, q, q_stride, lo, hi);
  for (int r = 0; r < R; ++r) {
    half[r][0] = _mm256_madd_epi16(lo[r], ones);
    half[r][1] = _mm256_madd_epi16(hi[r], ones);
    lo[r] = hi[r] = _mm256_setzero_si256();
  }
  asm volatile("" : "+m"(half));  // in memory, not in 8 registers
  pair_5bit<F, R, 2>(w, q, q_stride, lo, hi);
  pair_5bit<F, R, 3>(w, q, q_stride, lo, hi);
  for (int r = 0; r < R; ++r) {
    lo[r] = _mm256_add_epi32(half[r][0], _mm256_madd_epi16(lo[r], ones));
    hi[r] = _mm256_add_epi32(half[r][1], _mm256_madd_epi16(hi[r], ones));
  }
  sink(lo, hi);
}

template <class F, int R, class Sink>
RL_INLINE void block_8bit(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, const Sink& sink) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i lo[R], hi[R];
  for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const __m256i w_lo = load_bytes(w + g * 64), w_hi = load_bytes(w + g * 64 + 32);
    const __m256i a_lo = _mm256_abs_epi8(w_lo), a_hi = _mm256_abs_epi8(w_hi);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i b = four_k(q + r * q_stride + g * 4);
      lo[r] = _mm256_add_epi32(lo[r], _mm256_madd_epi16(_mm256_maddubs_epi16(a_lo, _mm256_sign_epi8(b, w_lo)), ones));
      hi[r] = _mm256_add_epi32(hi[r], _mm256_madd_epi16(_mm256_maddubs_epi16(a_hi, _mm256_sign_epi8(b, w_hi)), ones));
      asm volatile("" : "+x"(lo[r]), "+x"(hi[r]));
    }
  }
  sink(lo, hi);
}

// The integer sums of one block of the group at `w` with one plane of the activations.
template <class F, int R, class Sink>
RL_INLINE void dot_block(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, const Sink& sink) {
  if constexpr (F::kBits == 4) block_4bit<F, R>(w, q, q_stride, sink);
  if constexpr (F::kBits == 5) block_5bit<F, R>(w, q, q_stride, sink);
  if constexpr (F::kBits == 8) block_8bit<F, R>(w, q, q_stride, sink);
  asm volatile("" ::: "memory");  // float accumulators stay in memory
}

// A block that stands out in some row. Its own function: the sums of the first plane wait in L1, and the common block keeps its registers.
template <class F, int R>
__attribute__((noinline)) void add_two_planes(const uint8_t* w, const TileInput& in, float (*acc)[kUnitColumns]) {
  alignas(32) __m256i sums[R][2];
  dot_block<F, R>(w, in.q, in.k, ToSums<F, R>{in, sums});
  dot_block<F, R>(w, in.low(), in.k, SumsToAcc<F, R>{w, in, sums, acc});
}

// One block of the group at `w`, into the sums of its 16 columns.
template <class F, int R>
RL_INLINE void add_block(const uint8_t* w, const TileInput& in, bool two_planes, float (*acc)[kUnitColumns]) {
  if (two_planes) {
    add_two_planes<F, R>(w, in, acc);
  } else {
    dot_block<F, R>(w, in.q, in.k, ToAcc<F, R>{w, in, acc});
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
