// What this machine can do right now, by loops that do nothing else: int8 multiply-adds in registers, and reading memory. Benchmarks bracket every
// measurement with them, because virtual CPUs drift by factors (docs/benchmarks.md).
#include "rootlet/calibrate.h"

#include "rootlet/dispatch.h"
#include "rootlet/simd.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

// The instruction that the quantised tile lives on, in independent chains. Returns multiply-adds done.
#if defined(__AVX512VNNI__)
RL_INLINE int64_t multiply_add(int64_t rounds, int32_t* sink) {
  constexpr int kChains = 12;
  __m512i acc[kChains], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  for (auto& x : acc) x = _mm512_setzero_si512();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      acc[c] = _mm512_dpbusd_epi32(acc[c], a, b);
      asm volatile("" : "+v"(acc[c]));
    }
  }
  for (auto& x : acc) *sink += _mm512_reduce_add_epi32(x);
  return rounds * kChains * 64;
}
#elif defined(__AVX2__)
RL_INLINE int64_t multiply_add(int64_t rounds, int32_t* sink) {
  constexpr int kChains = 8;
  __m256i acc[kChains], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5);
  for (auto& x : acc) x = _mm256_setzero_si256();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) {
      asm volatile("" : "+x"(a));
      acc[c] = _mm256_add_epi16(acc[c], _mm256_maddubs_epi16(a, b));
    }
  }
  for (auto& x : acc) *sink += _mm256_extract_epi16(x, 0);
  return rounds * kChains * 32;
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
