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
inline constexpr int kTileVectors = 6;

#endif

RL_INLINE void set(f32x8& to, float x) { to = set1(x); }
RL_INLINE void get(f32x8& to, const float* p) { to = load(p); }
RL_INLINE void get(f32x8& to, const uint16_t* p) { to = load_f16(p); }
RL_INLINE void get(f32x8& to, const int8_t* p) { to = load_i8(p); }
RL_INLINE void put(float* p, f32x8 x) { store(p, x); }

}  // namespace rootlet::ROOTLET_ISA
