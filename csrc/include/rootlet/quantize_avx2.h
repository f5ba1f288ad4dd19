// Activation quantisation on AVX2. Meaning: quantize_scalar.h.
#pragma once
#include <immintrin.h>

#include "rootlet/block_scale.h"
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE float block_top(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i * 8)), magnitude));
  __m128i t = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  t = _mm_max_epu32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_max_epu32(t, _mm_shuffle_epi32(t, 0xb1));
  return float_of(static_cast<uint32_t>(_mm_cvtsi128_si32(t)));
}

// Stores 32 values that fit int8, and returns their sum.
RL_INLINE int store_bytes(const __m256i (&n)[4], int8_t* to) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
  __m128i u = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  u = _mm_add_epi32(u, _mm_shuffle_epi32(u, 0x4e));
  u = _mm_add_epi32(u, _mm_shuffle_epi32(u, 0xb1));
  return _mm_cvtsi128_si32(u);
}

RL_INLINE void quantize_block(const float* x, BlockScale scale, int8_t* q, ActScale* s) {
  __m256i n[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i * 8), _mm256_set1_ps(scale.inverse));
    n[i] = scale.inverse == 0.0f ? _mm256_setzero_si256() : _mm256_cvtps_epi32(y);
  }
  const int sum = store_bytes(n, q);
  *s = {scale.d, scale.d * static_cast<float>(sum), sum, 0, 0, 0};
}

RL_INLINE int quantize_rest(const float* x, float inverse, int8_t* low) {
  __m256i n[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i * 8), _mm256_set1_ps(inverse));
    const __m256 rest = _mm256_sub_ps(y, _mm256_cvtepi32_ps(_mm256_cvtps_epi32(y)));
    n[i] = inverse == 0.0f ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(kLowScale)));
  }
  return store_bytes(n, low);
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
