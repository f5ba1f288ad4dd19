// Activation quantisation on AVX2. Meaning: quantize_scalar.h.
#pragma once
#include <immintrin.h>

#include "rootlet/block_scale.h"
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

RL_INLINE void quantize_block(const float* x, int8_t* q, ActScale* s) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256 v[4];
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + i * 8);
    top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  }
  __m128i t = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  t = _mm_max_epu32(t, _mm_shuffle_epi32(t, 0x4e));
  t = _mm_max_epu32(t, _mm_shuffle_epi32(t, 0xb1));
  const BlockScale scale = block_scale(float_of(static_cast<uint32_t>(_mm_cvtsi128_si32(t))));
  __m256i n[4];
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    n[i] = scale.inverse == 0.0f ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(scale.inverse)));
    sum = _mm256_add_epi32(sum, n[i]);
  }
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  __m128i u = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  u = _mm_add_epi32(u, _mm_shuffle_epi32(u, 0x4e));
  u = _mm_add_epi32(u, _mm_shuffle_epi32(u, 0xb1));
  const int total = _mm_cvtsi128_si32(u);
  *s = {scale.d, scale.d * static_cast<float>(total), total};
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
