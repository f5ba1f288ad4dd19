// Sampling state of pool rows: compiled once by the host, counted after each draw. Ordinary code, built once; the kernels see only `SampleTask`s.
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "rootlet/sample.h"

namespace rootlet {
namespace {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

uint64_t mix(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

void check_ids(const char* what, const std::vector<int32_t>& ids, int vocab) {
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab) throw std::out_of_range(std::string(what) + " holds id " + std::to_string(id) + ", vocabulary " + std::to_string(vocab));
  }
}

}  // namespace

uint64_t noise_key(uint64_t seed, int32_t choice_index, int32_t index) {
  uint64_t h = mix(seed + kGamma);
  h = mix(h + static_cast<uint64_t>(choice_index) * kGamma);
  return mix(h + static_cast<uint64_t>(index) * kGamma);
}

struct SamplerState::Row {
  SampleRow spec;
  std::unordered_map<int32_t, size_t> slot;  // id -> place in count_ids / count_out
  std::vector<int32_t> top_ids;
  std::vector<double> top_logprobs;
};

SamplerState::SamplerState(int max_rows, int vocab, int max_logit_rows, int32_t* relay, int32_t* tokens, int32_t* status)
    : vocab_(vocab), relay_(relay), tokens_(tokens), status_(status), rows_(static_cast<size_t>(max_rows) + 1), tasks_(static_cast<size_t>(max_logit_rows)) {}

SamplerState::~SamplerState() = default;

void SamplerState::init_row(int pool_row, SampleRow spec) {
  if (pool_row < 0 || static_cast<size_t>(pool_row) >= rows_.size()) throw std::out_of_range("pool row " + std::to_string(pool_row));
  check_ids("stop_ids", spec.stop_ids, vocab_);
  check_ids("bias_ids", spec.bias_ids, vocab_);
  check_ids("allowed_ids", spec.allowed_ids, vocab_);
  check_ids("count_ids", spec.count_ids, vocab_);
  check_ids("extra_ids", spec.extra_ids, vocab_);
  if (spec.bias_ids.size() != spec.bias_values.size() || spec.count_ids.size() != spec.count_out.size()) throw std::out_of_range("unequal lengths");
  if (spec.top_n > vocab_) throw std::out_of_range("top_n above the vocabulary");
  auto row = std::make_unique<Row>();
  row->spec = std::move(spec);
  for (size_t i = 0; i < row->spec.count_ids.size(); ++i) row->slot[row->spec.count_ids[i]] = i;
  if (row->spec.top_n >= 0) {
    row->top_ids.resize(static_cast<size_t>(row->spec.top_n) + row->spec.extra_ids.size() + 1);
    row->top_logprobs.resize(row->top_ids.size());
  }
  rows_[static_cast<size_t>(pool_row)] = std::move(row);
}

void SamplerState::begin(const int32_t* pool_rows, int count) {
  if (count < 0 || static_cast<size_t>(count) > tasks_.size()) throw std::out_of_range(std::to_string(count) + " rows to sample");
  num_tasks_ = 0;
  for (int r = 0; r < count; ++r) {
    const auto at = static_cast<size_t>(pool_rows[r]);
    if (pool_rows[r] < 0 || at >= rows_.size() || !rows_[at]) throw std::out_of_range("pool row " + std::to_string(pool_rows[r]) + " was not initialised");
    Row& row = *rows_[at];
    const SampleRow& s = row.spec;
    SampleTask& t = tasks_[static_cast<size_t>(r)];
    t = {};
    t.pool_row = pool_rows[r];
    t.greedy = s.greedy, t.top_k = s.top_k, t.top_n = s.top_n;
    t.noise_key = noise_key(s.seed, s.choice_index, s.drawn);
    t.temperature = s.temperature, t.top_p = s.top_p, t.min_p = s.min_p;
    t.repetition = s.repetition, t.frequency = s.frequency, t.presence = s.presence;
    t.stop_ids = s.stop_ids.data(), t.num_stop = s.drawn < s.min_new_tokens ? static_cast<int32_t>(s.stop_ids.size()) : 0;
    t.bias_ids = s.bias_ids.data(), t.bias_values = s.bias_values.data(), t.num_bias = static_cast<int32_t>(s.bias_ids.size());
    t.allowed_ids = s.allowed_ids.data(), t.num_allowed = s.has_allowed ? static_cast<int32_t>(s.allowed_ids.size()) : -1;
    t.count_ids = s.count_ids.data(), t.count_out = s.count_out.data();
    t.num_counts = s.has_penalties ? static_cast<int32_t>(s.count_ids.size()) : 0;
    t.extra_ids = s.extra_ids.data(), t.num_extra = static_cast<int32_t>(s.extra_ids.size());
    t.top_ids = row.top_ids.data(), t.top_logprobs = row.top_logprobs.data();
  }
  num_tasks_ = count;
}

void SamplerState::after_draw(int32_t pool_row, int32_t token) {
  Row& row = *rows_[static_cast<size_t>(pool_row)];
  SampleRow& s = row.spec;
  ++s.drawn;
  if (!s.has_penalties) return;
  const auto [it, fresh] = row.slot.try_emplace(token, s.count_ids.size());
  if (fresh) {
    s.count_ids.push_back(token);
    s.count_out.push_back(0);
  }
  ++s.count_out[it->second];
}

SampleArgs SamplerState::args(float* logits, int64_t stride) {
  return {logits, stride, vocab_, tasks_.data(), &num_tasks_, tokens_, status_, relay_, this};
}

int SamplerState::outputs(int pool_row) const {
  const auto& row = rows_.at(static_cast<size_t>(pool_row));
  if (!row) throw std::out_of_range("pool row " + std::to_string(pool_row) + " was not initialised");
  return row->spec.drawn;
}

const SampleTask& SamplerState::task(int r) const {
  if (r < 0 || r >= num_tasks_) throw std::out_of_range("logit row " + std::to_string(r));
  return tasks_[static_cast<size_t>(r)];
}

}  // namespace rootlet
