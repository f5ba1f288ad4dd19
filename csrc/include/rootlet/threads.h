// The thread team. The caller is worker 0; the others spin briefly between runs, then sleep. All workers enter every op of a run together and
// meet at a barrier after it. How work is split (by columns, by rows, or by `take`) never changes a bit of the result.
#pragma once
#include <cstddef>
#include <cstdint>

#include "rootlet/tensor_args.h"

namespace rootlet {

class Team;

struct Range {
  int begin;
  int end;
};

// Share `i` of `count` of [0, n), in multiples of `align` (the last may be short).
RL_SHARED Range share_of(int n, int align, int i, int count) {
  const int64_t units = (static_cast<int64_t>(n) + align - 1) / align;
  const int64_t begin = units * i / count * align, end = units * (i + 1) / count * align;
  return {static_cast<int>(begin < n ? begin : n), static_cast<int>(end < n ? end : n)};
}

// One thread's view of the run. Methods are out of line on purpose: a header inline compiled for one instruction set must not be linked into another.
class Worker {
 public:
  RL_SHARED int thread() const { return thread_; }
  RL_SHARED int num_threads() const { return num_threads_; }

  // All workers meet. Resets `take`'s counter. An op that has phases calls it an equal number of times on every worker.
  void barrier();

  // Hands out [0, ...) in steps of `count` to whichever worker asks: returns the first index of the claimed step. One counter lives between two
  // barriers, so an op takes from one loop only, and calls `barrier` before a second one.
  int take(int count = 1);

  // Hands out [0, n), one index a call, this worker's own share first and in order, then what the others have left of theirs; n when nothing is left.
  // The rules of `take` hold, and a loop takes by one of the two only.
  int take_near(int n);

  // This worker's contiguous share of [0, n), in multiples of `align` (the last may be short).
  Range share(int n, int align = 1) const;

  // This thread's own scratch, at least `bytes`, 64-byte aligned; contents do not outlive the op.
  void* scratch(size_t bytes);

 private:
  friend class Team;
  int thread_ = 0;
  int num_threads_ = 1;
  Team* team_ = nullptr;
  void* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

struct Op {
  OpFn fn;
  const void* args;
};

// Where the time of a profiled run went: `ns` of worker 0 inside op i, `wait_ns` at the barrier after it.
struct OpTimer {
  uint64_t calls;
  uint64_t ns;
  uint64_t wait_ns;
};

int team_size();
// Replaces the process's team: `size` workers including the caller. `pin`: each on a CPU of its own when there are enough (the caller only during whole
// steps). Without it a busy machine puts two workers on one CPU for long: measured half the speed. Waits for a running step.
void set_team(int size, bool pin);
// Runs ops in order. `timers` null = not profiled, which costs nothing. Thread-safe (runs queue up); must not be called from an op.
void run_ops(const Op* ops, int count, OpTimer* timers, bool whole_step = false);
// The CPUs this process may run on, as the team counts them.
int num_usable_cpus();

}  // namespace rootlet
