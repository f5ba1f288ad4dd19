// The draw's argument blocks and the row state behind them. Definition of every number: src/rootlet/kernels/reference_sampling.py.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "rootlet/tensor_args.h"

namespace rootlet {

enum SampleStatus : int32_t { kSampleOk = 0, kNotFinite = 1, kNothingAllowed = 2 };

// One row that draws in this step: a view of its state, and where its answer goes. Plain pointers, so that kernels share no inline code.
struct SampleTask {
  int32_t pool_row;
  int32_t greedy, top_k, top_n;  // top_n < 0: no logprobs
  uint64_t noise_key;
  double temperature, top_p, min_p, repetition, frequency, presence;
  const int32_t *stop_ids, *bias_ids, *allowed_ids, *count_ids, *count_out, *extra_ids;
  const float* bias_values;
  int32_t num_stop, num_bias, num_allowed, num_counts, num_extra;  // num_stop 0 once min_tokens is reached; num_allowed < 0: all ids
  double logprob;
  int32_t* top_ids;  // [top_n + num_extra]
  double* top_logprobs;
  int32_t num_top;
};

class SamplerState;

struct SampleArgs {
  float* logits;  // [R, vocab], changed in place by edits
  int64_t stride;
  int32_t vocab;
  SampleTask* tasks;
  const int32_t* num_tasks;
  int32_t *tokens, *status, *relay;
  SamplerState* state;
};

struct LogprobArgs {
  const float* logits;  // [rows, vocab]
  int64_t stride;
  int32_t rows, vocab, top_n;
  const int32_t* targets;
  int32_t* status;
  double* logprob;       // [rows]
  int32_t* top_ids;      // [rows, top_n]
  double* top_logprobs;  // [rows, top_n]
};

// Everything a pool row keeps between draws.
struct SampleRow {
  uint64_t seed = 0;
  int32_t choice_index = 0, drawn = 0, greedy = 0, top_k = 0, min_new_tokens = 0, top_n = -1, has_penalties = 0, has_allowed = 0;
  double temperature = 1, top_p = 1, min_p = 0, repetition = 1, frequency = 0, presence = 0;
  std::vector<int32_t> stop_ids, bias_ids, allowed_ids, count_ids, count_out, extra_ids;
  std::vector<float> bias_values;
};

// Row states of one executor and the static task list of the step. Not thread-safe, except `after_draw` for different rows.
class SamplerState {
 public:
  SamplerState(int max_rows, int vocab, int max_logit_rows, int32_t* relay, int32_t* tokens, int32_t* status);
  ~SamplerState();
  SamplerState(const SamplerState&) = delete;
  SamplerState& operator=(const SamplerState&) = delete;

  // Throws std::out_of_range on a row or an id outside the tables.
  void init_row(int pool_row, SampleRow row);
  void begin(const int32_t* pool_rows, int count);
  // Called by the op: counts the token and moves the row to its next output.
  void after_draw(int32_t pool_row, int32_t token);

  SampleArgs args(float* logits, int64_t stride);
  int outputs(int pool_row) const;
  const SampleTask& task(int r) const;

 private:
  struct Row;
  int vocab_;
  int32_t num_tasks_ = 0;
  int32_t *relay_, *tokens_, *status_;
  std::vector<std::unique_ptr<Row>> rows_;
  std::vector<SampleTask> tasks_;
};

uint64_t noise_key(uint64_t seed, int32_t choice_index, int32_t index);

}  // namespace rootlet
