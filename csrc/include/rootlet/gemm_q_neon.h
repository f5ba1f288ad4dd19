// The quantised tile on NEON, with the dot product instruction where the set has it. Meaning: gemm_q_scalar.h.
//
// A vector of 16 weight bytes is 4 columns x 4 k, and four rows of activations meet it as broadcast dwords. With vdotq a lane sums its column's four
// products at once. Without it products stay in int16, one lane for each (column, k % 4): 8 k-groups of |31 * 127| and 2 of |128 * 127| stay below
// 2^15, so 4- and 5-bit blocks widen once and 8-bit ones every second group. All of it is exact, so order is free.
// Registers at R = 4: 4 or 16 accumulators, 1 weight, 1 broadcast. The empty asm statements are those of gemm_q_avx2.h. Float accumulators live in L1:
// one load and store a block. Bits were compared under an emulator (tests/equality/test_kernel_bits.py); speed on a real processor was not measured.
#pragma once
#include <arm_neon.h>

#include "rootlet/quant_formats.h"
#include "rootlet/tile_input.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kQuad = 4;  // columns of one vector

RL_INLINE int8x16_t four_k(const int8_t* q) {
  int32_t dword;
  __builtin_memcpy(&dword, q, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(dword));
}

// k-group g of the quad whose vectors begin at `w`: unsigned values of 4 or 5 bits, or signed bytes.
template <class F>
RL_INLINE int8x16_t weights_of(const uint8_t* w, int g) {
  if (F::kBits == 8) return vreinterpretq_s8_u8(vld1q_u8(w + g * 64));
  const uint8x16_t pair = vld1q_u8(w + g / 2 * 64);
  uint8x16_t value = g % 2 ? vshrq_n_u8(pair, 4) : vandq_u8(pair, vdupq_n_u8(15));
  if (F::kBits == 5) {
    const uint8x16_t moved = vshlq_u8(vld1q_u8(w + F::kHigh), vdupq_n_s8(static_cast<int8_t>(4 - g)));
    value = vorrq_u8(value, vandq_u8(moved, vdupq_n_u8(16)));
  }
  return vreinterpretq_s8_u8(value);
}

#if defined(__ARM_FEATURE_DOTPROD)

struct QuadSum {
  int32x4_t sum;
};

RL_INLINE QuadSum no_products() { return {vdupq_n_s32(0)}; }

template <class F>
RL_INLINE void add_products(QuadSum& s, int8x16_t w, int8x16_t q, int) {
  s.sum = vdotq_s32(s.sum, w, q);
  asm volatile("" : "+w"(s.sum));
}

RL_INLINE int32x4_t column_sums(const QuadSum& s) { return s.sum; }

#else

struct QuadSum {
  int16x8_t low, high;   // columns 0 and 1, columns 2 and 3
  int32x4_t wide[2];  // pairs of products that were widened
};

RL_INLINE QuadSum no_products() { return {vdupq_n_s16(0), vdupq_n_s16(0), {vdupq_n_s32(0), vdupq_n_s32(0)}}; }

RL_INLINE void widen_products(QuadSum& s) {
  s.wide[0] = vpadalq_s16(s.wide[0], s.low);
  s.wide[1] = vpadalq_s16(s.wide[1], s.high);
  s.low = s.high = vdupq_n_s16(0);
}

template <class F>
RL_INLINE void add_products(QuadSum& s, int8x16_t w, int8x16_t q, int g) {
  s.low = vmlal_s8(s.low, vget_low_s8(w), vget_low_s8(q));
  s.high = vmlal_high_s8(s.high, w, q);
  asm volatile("" : "+w"(s.low), "+w"(s.high));
  if (F::kBits == 8 ? g % 2 : g == 7) widen_products(s);
}

RL_INLINE int32x4_t column_sums(const QuadSum& s) { return vpaddq_s32(s.wide[0], s.wide[1]); }

#endif

RL_INLINE float32x4_t four_halves(const uint8_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

// Sums of the quad's products with one plane of the activations.
template <class F, int R>
RL_INLINE void dot_quad(const uint8_t* w, const int8_t* q, ptrdiff_t q_stride, int32x4_t (&isum)[R]) {
  QuadSum sums[R];
  for (int r = 0; r < R; ++r) sums[r] = no_products();
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const int8x16_t weights = weights_of<F>(w, g);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) add_products<F>(sums[r], weights, four_k(q + r * q_stride + g * 4), g);
  }
  for (int r = 0; r < R; ++r) isum[r] = column_sums(sums[r]);
}

// One block of the group at `w`, into the sums of its 16 columns.
template <class F, int R>
RL_INLINE void add_block(const uint8_t* w, const TileInput& in, bool two_planes, float (*acc)[kUnitColumns]) {
  for (int c = 0; c < kGroupColumns; c += kQuad) {
    int32x4_t isum[R];
    dot_quad<F, R>(w + c * 4, in.q, in.k, isum);
    for (int r = 0; r < R; ++r) isum[r] = vsubq_s32(isum[r], vdupq_n_s32(F::kZero * in.scale(r).sum));
    if (two_planes) {
      int32x4_t rest[R];
      dot_quad<F, R>(w + c * 4, in.low(), in.k, rest);
      for (int r = 0; r < R; ++r) {
        rest[r] = vsubq_s32(rest[r], vdupq_n_s32(F::kZero * in.scale(r).low_sum));
        isum[r] = vaddq_s32(vshlq_s32(isum[r], vdupq_n_s32(in.scale(r).low_bits)), rest[r]);
      }
    }
    const float32x4_t d = four_halves(w + F::kScales + c * 2);
    const float32x4_t m = four_halves(w + (F::kMin ? F::kMinima : F::kScales) + c * 2);
    for (int r = 0; r < R; ++r) {
      const ActScale& scale = in.scale(r);
      float32x4_t y = vfmaq_f32(vld1q_f32(acc[r] + c), vcvtq_f32_s32(isum[r]), vmulq_n_f32(d, scale.d));
      if (F::kMin) y = vfmaq_f32(y, m, vdupq_n_f32(scale.d_sum));
      vst1q_f32(acc[r] + c, y);
    }
  }
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
