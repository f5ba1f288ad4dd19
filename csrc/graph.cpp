#include "rootlet/graph.h"

#include <cstring>
#include <stdexcept>

namespace rootlet {

Tape::Tape() = default;

void Tape::append(const char* name, OpFn fn, const void* args, size_t bytes) {
  std::unique_ptr<uint64_t[]> copy(new uint64_t[(bytes + 7) / 8]);
  memcpy(copy.get(), args, bytes);
  ops_.push_back({fn, copy.get()});
  names_.push_back(name);
  args_.push_back(std::move(copy));
  timers_.push_back({});
}

void Tape::move_elided(size_t op, size_t offset) {
  for (Elided& e : elided_) {
    if (e.op == op) e.offset += offset;
  }
}

void Tape::materialise(uintptr_t address) {
  for (size_t i = elided_.size(); i-- > 0;) {  // the latest: an address is used again and again
    if (elided_[i].address != address) continue;
    memcpy(reinterpret_cast<char*>(args_[elided_[i].op].get()) + elided_[i].offset, &address, sizeof address);
    elided_.erase(elided_.begin() + static_cast<ptrdiff_t>(i));
    return;
  }
}

Count Tape::count(RowSpace space, int32_t max_rows) {
  if (space == kFixed) return {nullptr, max_rows};
  int32_t& limit = max_rows_[space];
  if (limit == 0 || max_rows < limit) limit = max_rows;
  const int32_t* live[] = {&header_.num_tokens, &header_.num_logit_rows};
  return {live[space], max_rows};
}

void Tape::replay(const StepHeader& counts, bool profile) {
  const int32_t asked[] = {counts.num_tokens, counts.num_logit_rows};
  const char* names[] = {"num_tokens", "num_logit_rows"};
  for (int i = 0; i < kNumRowSpaces; ++i) {
    if (asked[i] < 0 || (max_rows_[i] != 0 && asked[i] > max_rows_[i])) {
      throw std::invalid_argument(std::string(names[i]) + " = " + std::to_string(asked[i]) + " is outside [0, " + std::to_string(max_rows_[i]) +
                              "], the size the graph was captured with");
    }
  }
  header_ = counts;
  run_ops(ops_.data(), static_cast<int>(ops_.size()), profile ? timers_.data() : nullptr, true);
}

void Tape::reset_timers() {
  for (OpTimer& t : timers_) t = {};
}

}  // namespace rootlet
