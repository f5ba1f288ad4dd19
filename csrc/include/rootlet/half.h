// f16 and bf16 <-> f32 in plain integer code: the definition that the hardware conversions agree with (round to nearest, ties to even).
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef RL_INLINE
#define RL_INLINE static inline __attribute__((always_inline))
#endif

namespace rootlet::ROOTLET_ISA {

RL_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

RL_INLINE float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

RL_INLINE float bf16_to_f32(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

RL_INLINE float f16_to_f32(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(ROOTLET_NEON)
  __fp16 x;
  memcpy(&x, &h, 2);
  return x;
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t exponent = rest & 0x0f800000u;
  if (exponent == 0x0f800000u) {  // infinity, or NaN (made quiet)
    return float_of(sign | 0x7f800000u | (rest & 0x007fffffu) | ((rest & 0x007fffffu) ? 0x00400000u : 0u));
  }
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(h & 0x7fffu) * 0x1p-24f));
  return float_of(sign | (rest + 0x38000000u));
#endif
}

RL_INLINE uint16_t f32_to_f16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x1ffu));
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (a < 0x38800000u) {  // subnormal half: adding 0.5 leaves round(a * 2^24) in the low bits
    return static_cast<uint16_t>(sign | (bits_of(float_of(a) + 0.5f) - 0x3f000000u));
  }
  const uint32_t odd = (a >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xfffu + odd) >> 13));
}

}  // namespace rootlet::ROOTLET_ISA
