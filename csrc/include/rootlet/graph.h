// The tape: a recorded step. Ops are appended once, with their argument blocks copied; replay sets the header and runs them all in one call.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "rootlet/tensor_args.h"
#include "rootlet/threads.h"

namespace rootlet {

class Tape {
 public:
  Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  // Copies `bytes` of argument block. `name` must outlive the tape (a literal).
  void append(const char* name, OpFn fn, const void* args, size_t bytes);
  // For fuse.h. The op `back` from the end (0 = last) when it is called `name` and its arguments are of type Args, else null; valid until the next change.
  template <class Args>
  Args* recent(const char* name, size_t back = 0) {
    if (back >= ops_.size() || std::strcmp(names_[ops_.size() - 1 - back], name) != 0) return nullptr;
    return reinterpret_cast<Args*>(args_[ops_.size() - 1 - back].get());
  }
  void drop_last() { ops_.pop_back(), names_.pop_back(), args_.pop_back(), timers_.pop_back(); }

  // The float buffer at `address` is left out by op number `op`, whose pointer to it (null now) lies `offset` bytes into its arguments.
  void elide(uintptr_t address, size_t op, size_t offset) { elided_.push_back({address, op, offset}); }
  // What op `op` leaves out is left out by the op that takes its number, `offset` bytes further on.
  void move_elided(size_t op, size_t offset);
  // Somebody reads it after all: it is written from now on.
  void materialise(uintptr_t address);

  // A count that follows `space` at replay; `max_rows` is the captured size, which replay may not exceed.
  Count count(RowSpace space, int32_t max_rows);
  // Throws std::invalid_argument when a count is negative or above the captured maximum of its space.
  void replay(const StepHeader& counts, bool profile);

  size_t size() const { return ops_.size(); }
  const char* name(size_t i) const { return names_[i]; }
  const OpTimer& timer(size_t i) const { return timers_[i]; }
  void reset_timers();

 private:
  struct Elided {
    uintptr_t address;
    size_t op, offset;
  };

  StepHeader header_{};
  int32_t max_rows_[kNumRowSpaces] = {};
  std::vector<Op> ops_;
  std::vector<const char*> names_;
  std::vector<std::unique_ptr<uint64_t[]>> args_;
  std::vector<OpTimer> timers_;
  std::vector<Elided> elided_;
};

}  // namespace rootlet
