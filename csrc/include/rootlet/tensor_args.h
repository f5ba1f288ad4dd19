// What every kernel's argument block is made of. An op is a plain struct of pointers and sizes (copied byte for byte onto a tape) and a function
//     void op(const void* args, Worker& w)
// that every worker of the team enters. Shapes and meanings: src/rootlet/kernels/ops.py. This header knows no Python and no torch.
#pragma once
#include <cstddef>
#include <cstdint>

// Shared by code for several instruction sets: never a linked copy, which could hold instructions that this machine lacks.
#define RL_SHARED inline __attribute__((always_inline))

namespace rootlet {

// Row counts of one step, read at replay. One tape serves every batch up to its captured maximum.
struct StepHeader {
  int32_t num_tokens;      // T
  int32_t num_logit_rows;  // R
};

// Which count of the header a tensor's leading dimension follows. kFixed: the size it had when the op was made. Attention needs none of its own: it
// reads how many work items there are from the buffer beside them.
enum RowSpace : int32_t { kFixed = -1, kTokens = 0, kLogitRows = 1, kNumRowSpaces = 2 };

// A row count: live (points into a tape's header) or fixed (eager).
struct Count {
  const int32_t* live;
  int32_t fixed;
  RL_SHARED int32_t get() const { return live ? *live : fixed; }
};

enum class WeightKind : int32_t { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kNumKinds };

inline constexpr int kQuantBlock = 32;    // values that share a scale, in weights and in quantised activations
inline constexpr int kMarked = 8;         // quantised blocks that share a byte which says where a second plane is
inline constexpr int kGroupColumns = 16;  // output features that are packed together

// Scale of one quantised activation block: x = d * q, q int8 in [-127, 127]; of a block with a second plane: x = d * ((q << low_bits) + low).
struct ActScale {
  float d;
  float d_sum;       // d * sum of what d multiplies
  int32_t sum;       // sum(q)
  int16_t low_sum;   // sum(low)
  int8_t low_bits;    // 0: the block has no second plane (where a row has one, this part of it is zero)
  uint8_t stand_out;  // of each eighth block of a row: bit i is set where the i-th block from here on has a second plane
};

class Worker;
using OpFn = void (*)(const void* args, Worker& w);

}  // namespace rootlet
