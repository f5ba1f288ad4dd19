// f32x8 on AVX2 + FMA + F16C. Meanings: simd_scalar.h.
#pragma once
#include <immintrin.h>

#include "rootlet/half.h"

namespace rootlet::ROOTLET_ISA {

struct f32x8 {
  __m256 v;
};

RL_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

RL_INLINE f32x8 set1(float x) { return {_mm256_set1_ps(x)}; }
RL_INLINE f32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
RL_INLINE f32x8 load_n(const float* p, int n) { return n >= 8 ? load(p) : f32x8{_mm256_maskload_ps(p, first_lanes(n))}; }
RL_INLINE f32x8 load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
RL_INLINE f32x8 load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
RL_INLINE f32x8 load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16))};
}
RL_INLINE void store(float* p, f32x8 x) { _mm256_storeu_ps(p, x.v); }
RL_INLINE void store_n(float* p, f32x8 x, int n) {
  if (n >= 8) {
    store(p, x);
  } else {
    _mm256_maskstore_ps(p, first_lanes(n), x.v);
  }
}
RL_INLINE void store_f16(uint16_t* p, f32x8 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
RL_INLINE f32x8 add(f32x8 a, f32x8 b) { return {_mm256_add_ps(a.v, b.v)}; }
RL_INLINE f32x8 sub(f32x8 a, f32x8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
RL_INLINE f32x8 mul(f32x8 a, f32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
RL_INLINE f32x8 div(f32x8 a, f32x8 b) { return {_mm256_div_ps(a.v, b.v)}; }
RL_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
RL_INLINE f32x8 max(f32x8 a, f32x8 b) { return {_mm256_max_ps(a.v, b.v)}; }
RL_INLINE f32x8 min(f32x8 a, f32x8 b) { return {_mm256_min_ps(a.v, b.v)}; }
RL_INLINE f32x8 neg(f32x8 a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
RL_INLINE f32x8 select_lt(f32x8 a, f32x8 b, f32x8 x, f32x8 y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
RL_INLINE f32x8 pow2_of_magic(f32x8 t) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t.v), 23), _mm256_set1_epi32(0x3f800000)))};
}

RL_INLINE float hsum(f32x8 x) {
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
RL_INLINE float hmax(f32x8 x) {
  const __m128 a = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

}  // namespace rootlet::ROOTLET_ISA
