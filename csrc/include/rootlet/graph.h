// The tape: a recorded step. Ops are appended once, with their argument blocks copied; replay sets the header and runs them all in one call.
#pragma once
#include <cstdint>
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
  // A count that follows `space` at replay; `max_rows` is the captured size, which replay may not exceed.
  Count count(RowSpace space, int32_t max_rows);
  // Throws std::invalid_argument when a count is negative or above the captured maximum of its space.
  void replay(const StepHeader& counts, bool profile);

  size_t size() const { return ops_.size(); }
  const char* name(size_t i) const { return names_[i]; }
  const OpTimer& timer(size_t i) const { return timers_[i]; }
  int32_t max_rows(RowSpace space) const { return max_rows_[space]; }
  void reset_timers();

 private:
  StepHeader header_{};
  int32_t max_rows_[kNumRowSpaces] = {};
  std::vector<Op> ops_;
  std::vector<const char*> names_;
  std::vector<std::unique_ptr<uint64_t[]>> args_;
  std::vector<OpTimer> timers_;
};

}  // namespace rootlet
