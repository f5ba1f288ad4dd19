// The block formats of quantised weights: 32 values that share scales. File form: GGUF. Packed form, for one block (32 k) of a
// group of 16 columns (nothing is requantised; padding columns are zero), block b of a unit's first group before block b of its second:
//
//   4- and 5-bit   256 B  nibbles: 4 pairs j of vectors (columns 0-7, then 8-15); dword c of a vector = 4 consecutive k of column c;
//                         low nibbles = k 8j .. 8j+3, high nibbles = k 8j+4 .. 8j+7
//   5-bit           64 B  fifth bits: one vector for columns 0-7, one for 8-15; bit g of a byte belongs to k-group g (k 4g .. 4g+3)
//   8-bit          512 B  8 k-groups of (columns 0-7, columns 8-15)
//   all             32 B  f16 scales d of the 16 columns;   q4_1, q5_1: 32 B f16 minima m
#pragma once
#include "rootlet/linear.h"

namespace rootlet::ROOTLET_ISA {
namespace {

template <WeightKind kKindValue, int kBitsValue, bool kMinValue, int kZeroValue>
struct Format {
  static constexpr WeightKind kKind = kKindValue;
  static constexpr int kBits = kBitsValue;
  static constexpr bool kMin = kMinValue;  // value = d * q + m
  static constexpr int kZero = kZeroValue;  // value = d * (q - zero), when there is no minimum
  static constexpr int kHigh = 256;         // offset of the fifth bits
  static constexpr int kScales = kBits == 8 ? 512 : kBits == 5 ? 320 : 256;
  static constexpr int kMinima = kScales + 32;
  static constexpr int kBytes = packed_block_bytes(kKind);
  static constexpr int kUnitBytes = kBytes * unit_groups(kKind);  // one block of a unit
};

constexpr int kUnitGroups = unit_groups(WeightKind::kQ4_0);
constexpr int kUnitColumns = unit_columns(WeightKind::kQ4_0);

using Q4_0 = Format<WeightKind::kQ4_0, 4, false, 8>;
using Q4_1 = Format<WeightKind::kQ4_1, 4, true, 0>;
using Q5_0 = Format<WeightKind::kQ5_0, 5, false, 16>;
using Q5_1 = Format<WeightKind::kQ5_1, 5, true, 0>;
using Q8_0 = Format<WeightKind::kQ8_0, 8, false, 0>;

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
