// Scale of one activation block from its largest magnitude; one definition for every instruction set.
#pragma once
#include "rootlet/half.h"

namespace rootlet::ROOTLET_ISA {
namespace {

constexpr int kLowBits = 7;  // of a second plane: what rounding left is in [-1/2, 1/2], so its values are in [-64, 64]
constexpr float kLowScale = 1 << kLowBits;

struct BlockScale {
  float d;        // top / 127
  float inverse;  // 0: all q are 0
};

RL_INLINE BlockScale block_scale(float top) {
  if (!(top < float_of(0x7f800000u))) return {float_of(0x7fc00000u), 0.0f};  // inf or NaN inside: the row must come out as NaN
  if (top < 1e-30f) return {0.0f, 0.0f};                                   // 127 / top would overflow
  return {top / 127.0f, 127.0f / top};
}

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
