// What this machine can do right now, by loops that do nothing else: int8 multiply-adds in registers, and reading memory. Benchmarks bracket every
// measurement with them, because virtual CPUs drift by factors (docs/benchmarks.md).
#include "rootlet/calibrate.h"

#include "rootlet/dispatch.h"
#include "rootlet/simd.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

// The instruction that the quantised tile lives on: `add_products` adds kMultiplyAdds products of `Bytes` to `Sums`. After `changed` the compiler
// cannot know what is in that register.
#if defined(__AVX512VNNI__)
using Bytes = __m512i;
using Sums = __m512i;
constexpr int kMultiplyAdds = 64;
RL_INLINE Bytes bytes(int8_t x) { return _mm512_set1_epi8(x); }
RL_INLINE Sums add_products(Sums acc, Bytes a, Bytes b) { return _mm512_dpbusd_epi32(acc, a, b); }
RL_INLINE void changed(__m512i& x) { asm volatile("" : "+v"(x)); }
#elif defined(__AVX2__)
using Bytes = __m256i;
using Sums = __m256i;
constexpr int kMultiplyAdds = 32;
RL_INLINE Bytes bytes(int8_t x) { return _mm256_set1_epi8(x); }
RL_INLINE Sums add_products(Sums acc, Bytes a, Bytes b) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(a, b)); }
RL_INLINE void changed(__m256i& x) { asm volatile("" : "+x"(x)); }
#elif defined(ROOTLET_NEON)
using Bytes = int8x16_t;
#if defined(__ARM_FEATURE_DOTPROD)
using Sums = int32x4_t;
constexpr int kMultiplyAdds = 16;
RL_INLINE Sums add_products(Sums acc, Bytes a, Bytes b) { return vdotq_s32(acc, a, b); }
#else
using Sums = int16x8_t;
constexpr int kMultiplyAdds = 8;
RL_INLINE Sums add_products(Sums acc, Bytes a, Bytes b) { return vmlal_high_s8(acc, a, b); }
#endif
RL_INLINE Bytes bytes(int8_t x) { return vdupq_n_s8(x); }
template <class Vector>
RL_INLINE void changed(Vector& x) {
  asm volatile("" : "+w"(x));
}
#else
using Bytes = int32_t;
using Sums = int32_t;
constexpr int kMultiplyAdds = 1;
RL_INLINE Bytes bytes(int8_t x) { return x; }
RL_INLINE Sums add_products(Sums acc, Bytes a, Bytes b) { return acc + a * b; }
RL_INLINE void changed(int32_t& x) { asm volatile("" : "+r"(x)); }
#endif

// One independent chain of sums for each argument of `chains`; returns multiply-adds done. Chains are parameters, not an array: the compiler keeps an
// array in memory, and then the loop measures how fast a store is forwarded to a load (a third of the truth). `a` is "changed" each time, so that no
// product is made once for all.
template <class... Chains>
RL_INLINE int64_t multiply_add(int64_t rounds, Chains... chains) {
  Bytes a = bytes(3);
  const Bytes b = bytes(5);
  for (int64_t i = 0; i < rounds; ++i) {
    ((changed(a), chains = add_products(chains, a, b)), ...);
    (changed(chains), ...);
  }
  return rounds * static_cast<int64_t>(sizeof...(chains)) * kMultiplyAdds;
}

void calibrate_multiply(const void* p, Worker& w) {
  const auto& a = *static_cast<const CalibrateArgs*>(p);
  const Sums zero = {};
#if defined(__AVX512VNNI__)
  a.done[w.thread()] = multiply_add(a.rounds, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero);
#elif defined(__AVX2__) || defined(ROOTLET_NEON)
  a.done[w.thread()] = multiply_add(a.rounds, zero, zero, zero, zero, zero, zero, zero, zero);
#else
  a.done[w.thread()] = multiply_add(a.rounds, zero);
#endif
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
