// What this machine can do right now, by loops that do nothing else: int8 multiply-adds in registers, and reading memory. Benchmarks bracket every
// measurement with them, because virtual CPUs drift by factors (docs/benchmarks.md).
#include "rootlet/calibrate.h"

#include "rootlet/dispatch.h"
#include "rootlet/simd.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

// The instruction that the quantised tile lives on, in independent chains. Returns multiply-adds done. Chains are named one by one: the compiler
// keeps an array of them in memory, and then the loop measures how fast a store is forwarded to a load (a third of the truth).
#if defined(__AVX512VNNI__)
RL_INLINE int64_t multiply_add(int64_t rounds, int32_t* sink) {
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5), zero = _mm512_setzero_si512();
  __m512i c0 = zero, c1 = zero, c2 = zero, c3 = zero, c4 = zero, c5 = zero, c6 = zero, c7 = zero, c8 = zero, c9 = zero, c10 = zero, c11 = zero;
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = _mm512_dpbusd_epi32(c0, a, b);
    c1 = _mm512_dpbusd_epi32(c1, a, b);
    c2 = _mm512_dpbusd_epi32(c2, a, b);
    c3 = _mm512_dpbusd_epi32(c3, a, b);
    c4 = _mm512_dpbusd_epi32(c4, a, b);
    c5 = _mm512_dpbusd_epi32(c5, a, b);
    c6 = _mm512_dpbusd_epi32(c6, a, b);
    c7 = _mm512_dpbusd_epi32(c7, a, b);
    c8 = _mm512_dpbusd_epi32(c8, a, b);
    c9 = _mm512_dpbusd_epi32(c9, a, b);
    c10 = _mm512_dpbusd_epi32(c10, a, b);
    c11 = _mm512_dpbusd_epi32(c11, a, b);
    asm volatile("" : "+v"(c0), "+v"(c1), "+v"(c2), "+v"(c3), "+v"(c4), "+v"(c5), "+v"(c6), "+v"(c7), "+v"(c8), "+v"(c9), "+v"(c10), "+v"(c11));
  }
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(_mm512_add_epi32(c0, c1), _mm512_add_epi32(c2, c3)),
                                       _mm512_add_epi32(_mm512_add_epi32(c4, c5), _mm512_add_epi32(c6, c7)));
  *sink += _mm512_reduce_add_epi32(_mm512_add_epi32(sum, _mm512_add_epi32(_mm512_add_epi32(c8, c9), _mm512_add_epi32(c10, c11))));
  return rounds * 12 * 64;
}
#elif defined(__AVX2__)
// `a` is "changed" each time, so that no product is made once for all.
RL_INLINE __m256i add_products(__m256i acc, __m256i& a, __m256i b) {
  asm volatile("" : "+x"(a));
  return _mm256_add_epi16(acc, _mm256_maddubs_epi16(a, b));
}

RL_INLINE int64_t multiply_add(int64_t rounds, int32_t* sink) {
  __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), zero = _mm256_setzero_si256();
  __m256i c0 = zero, c1 = zero, c2 = zero, c3 = zero, c4 = zero, c5 = zero, c6 = zero, c7 = zero;
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = add_products(c0, a, b);
    c1 = add_products(c1, a, b);
    c2 = add_products(c2, a, b);
    c3 = add_products(c3, a, b);
    c4 = add_products(c4, a, b);
    c5 = add_products(c5, a, b);
    c6 = add_products(c6, a, b);
    c7 = add_products(c7, a, b);
    asm volatile("" : "+x"(c0), "+x"(c1), "+x"(c2), "+x"(c3), "+x"(c4), "+x"(c5), "+x"(c6), "+x"(c7));
  }
  const __m256i low = _mm256_add_epi16(_mm256_add_epi16(c0, c1), _mm256_add_epi16(c2, c3));
  *sink += _mm256_extract_epi16(_mm256_add_epi16(low, _mm256_add_epi16(_mm256_add_epi16(c4, c5), _mm256_add_epi16(c6, c7))), 0);
  return rounds * 8 * 32;
}
#elif defined(ROOTLET_NEON)
#if defined(__ARM_FEATURE_DOTPROD)
using Products = int32x4_t;
constexpr int kProducts = 16;
RL_INLINE Products add_products(Products acc, int8x16_t a, int8x16_t b) { return vdotq_s32(acc, a, b); }
RL_INLINE int32_t joined(Products x) { return vaddvq_s32(x); }
#else
using Products = int16x8_t;
constexpr int kProducts = 8;
RL_INLINE Products add_products(Products acc, int8x16_t a, int8x16_t b) { return vmlal_high_s8(acc, a, b); }
RL_INLINE int32_t joined(Products x) { return vaddvq_s16(x); }
#endif

RL_INLINE int64_t multiply_add(int64_t rounds, int32_t* sink) {
  const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
  Products c0 = {}, c1 = {}, c2 = {}, c3 = {}, c4 = {}, c5 = {}, c6 = {}, c7 = {};
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = add_products(c0, a, b);
    c1 = add_products(c1, a, b);
    c2 = add_products(c2, a, b);
    c3 = add_products(c3, a, b);
    c4 = add_products(c4, a, b);
    c5 = add_products(c5, a, b);
    c6 = add_products(c6, a, b);
    c7 = add_products(c7, a, b);
    asm volatile("" : "+w"(c0), "+w"(c1), "+w"(c2), "+w"(c3), "+w"(c4), "+w"(c5), "+w"(c6), "+w"(c7));
  }
  *sink += joined(c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7);
  return rounds * 8 * kProducts;
}
#else
RL_INLINE int64_t multiply_add(int64_t rounds, int32_t* sink) {
  int32_t a = 3, acc = 0;
  for (int64_t i = 0; i < rounds; ++i) {
    acc += a * 5;
    asm volatile("" : "+r"(acc), "+r"(a));
  }
  *sink += acc;
  return rounds;
}
#endif

void calibrate_multiply(const void* p, Worker& w) {
  const auto& a = *static_cast<const CalibrateArgs*>(p);
  int32_t sink = 0;
  a.done[w.thread()] = multiply_add(a.rounds, &sink);
  asm volatile("" ::"r"(sink));
}
ROOTLET_OP(calibrate_multiply);

void calibrate_read(const void* p, Worker& w) {
  const auto& a = *static_cast<const CalibrateArgs*>(p);
  const Range mine = w.share(a.num_floats, 64);
  f32x8 sum[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  for (int i = mine.begin; i + 64 <= mine.end; i += 64) {
    for (int line = 0; line < 4; ++line) {
      __builtin_prefetch(a.floats + i + line * 16 + 512, 0, 3);
      sum[line] = add(sum[line], add(load(a.floats + i + line * 16), load(a.floats + i + line * 16 + 8)));
    }
  }
  const float total = hsum(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
  a.done[w.thread()] = static_cast<int64_t>(mine.end - mine.begin) * 4;
  asm volatile("" ::"m"(total));
}
ROOTLET_OP(calibrate_read);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
