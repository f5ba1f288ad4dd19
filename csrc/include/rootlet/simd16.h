// f32x16: sixteen floats, one register where the machine has one that wide, else two f32x8. Lane for lane the same IEEE operations everywhere.
#pragma once
#include "rootlet/simd.h"

namespace rootlet::ROOTLET_ISA {

#if defined(__AVX512F__)

struct f32x16 {
  __m512 v;
};

RL_INLINE void set(f32x16& to, float x) { to.v = _mm512_set1_ps(x); }
RL_INLINE void get(f32x16& to, const float* p) { to.v = _mm512_loadu_ps(p); }
RL_INLINE void get(f32x16& to, const uint16_t* p) { to.v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
RL_INLINE void get(f32x16& to, const int8_t* p) {
  to.v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
RL_INLINE void put(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
RL_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
RL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
RL_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
RL_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
RL_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
RL_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
RL_INLINE f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
RL_INLINE f32x16 pow2_of_magic(f32x16 t) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t.v), 23), _mm512_set1_epi32(0x3f800000)))};
}
RL_INLINE f32x8 low_half(f32x16 x) { return {_mm512_castps512_ps256(x.v)}; }
RL_INLINE f32x8 high_half(f32x16 x) { return {_mm512_extractf32x8_ps(x.v, 1)}; }
inline constexpr int kTileVectors = 24;  // f32x16 accumulators that fit beside their operands

#else

struct f32x16 {
  f32x8 a, b;
};

RL_INLINE void set(f32x16& to, float x) { to.a = to.b = set1(x); }
RL_INLINE void get(f32x16& to, const float* p) { to = {load(p), load(p + 8)}; }
RL_INLINE void get(f32x16& to, const uint16_t* p) { to = {load_f16(p), load_f16(p + 8)}; }
RL_INLINE void get(f32x16& to, const int8_t* p) { to = {load_i8(p), load_i8(p + 8)}; }
RL_INLINE void put(float* p, f32x16 x) {
  store(p, x.a);
  store(p + 8, x.b);
}
RL_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {mul(a.a, b.a), mul(a.b, b.b)}; }
RL_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {fma(a.a, b.a, c.a), fma(a.b, b.b, c.b)}; }
RL_INLINE f32x16 add(f32x16 a, f32x16 b) { return {add(a.a, b.a), add(a.b, b.b)}; }
RL_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {sub(a.a, b.a), sub(a.b, b.b)}; }
RL_INLINE f32x16 max(f32x16 a, f32x16 b) { return {max(a.a, b.a), max(a.b, b.b)}; }
RL_INLINE f32x16 min(f32x16 a, f32x16 b) { return {min(a.a, b.a), min(a.b, b.b)}; }
RL_INLINE f32x16 select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) { return {select_lt(a.a, b.a, x.a, y.a), select_lt(a.b, b.b, x.b, y.b)}; }
RL_INLINE f32x16 pow2_of_magic(f32x16 t) { return {pow2_of_magic(t.a), pow2_of_magic(t.b)}; }
RL_INLINE f32x8 low_half(f32x16 x) { return x.a; }
RL_INLINE f32x8 high_half(f32x16 x) { return x.b; }
inline constexpr int kTileVectors = 6;

#endif

RL_INLINE void set(f32x8& to, float x) { to = set1(x); }
RL_INLINE void get(f32x8& to, const float* p) { to = load(p); }
RL_INLINE void get(f32x8& to, const uint16_t* p) { to = load_f16(p); }
RL_INLINE void get(f32x8& to, const int8_t* p) { to = load_i8(p); }
RL_INLINE void put(float* p, f32x8 x) { store(p, x); }

template <class V>
RL_INLINE V splat(float x) {
  V v;
  set(v, x);
  return v;
}

template <class V>
RL_INLINE V read(const float* p) {
  V v;
  get(v, p);
  return v;
}

// Lanes l and l + 8 joined first, then the tree of f32x8.
RL_INLINE float hsum(f32x16 x) { return hsum(add(low_half(x), high_half(x))); }
RL_INLINE float hmax(f32x16 x) { return hmax(max(low_half(x), high_half(x))); }

}  // namespace rootlet::ROOTLET_ISA
