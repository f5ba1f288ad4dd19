// The draw, natively: greedy, filters, counter-based noise, and raw logprobs, a row a worker. Same bits as kernels/reference_sampling.py.
//
// A row costs one pass for the maximum (greedy: 200 KB of f32 at 49k ids, about 10 us). Logprobs add one exp pass in float64. A plain draw at
// temperature 1 hashes every id but evaluates the two logarithms only where the noise could still win: from the leading zeros of 1 - u follows
// g <= (52 - log2(k)) ln 2, and z + that bound below the best score so far settles it. Filters select the best n partially; a nucleus that 64 ids do
// not hold is found by dealing ids to buckets and sorting only the buckets it reaches.
// float64 arithmetic is plain IEEE multiply, add and divide in vectors of 4 (GCC vector types), never contracted to fma.
#include "rootlet/sample.h"

#include <algorithm>

#include "rootlet/dispatch.h"
#include "rootlet/math.h"
#include "rootlet/threads.h"

namespace rootlet::ROOTLET_ISA {
namespace {

typedef double f64x4 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));
typedef uint64_t u64x4 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

constexpr double kLog2E64 = 1.4426950408889634;
constexpr double kLn2Hi64 = 0.693147180369123816490, kLn2Lo64 = 1.90821492927058770002e-10;
constexpr double kExpMin = -708.0;
constexpr double kMagic64 = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, ties to even
constexpr double kFloatMax = 3.4028234663852886e38;
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
constexpr int kInsertionMax = 128;
constexpr int kFirstGuess = 64;  // candidates that nearly always hold a nucleus
constexpr int kBuckets = 1024;
constexpr double kExpCoeffs[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                                 1.0 / 720.0,        1.0 / 120.0,       1.0 / 24.0,       1.0 / 6.0,       0.5,            1.0,           1.0};

struct Candidate {
  float value;
  int32_t id;
};

struct Better {
  bool operator()(const Candidate& a, const Candidate& b) const { return a.value > b.value || (a.value == b.value && a.id < b.id); }
};

RL_INLINE f64x4 splat(double x) { return f64x4{x, x, x, x}; }

RL_INLINE f64x4 exp64x4(f64x4 x) {
  const f64x4 safe = x > kExpMin ? x : splat(kExpMin);
  const f64x4 t = safe * kLog2E64 + kMagic64;
  const f64x4 n = t - kMagic64;
  const f64x4 r = (safe - n * kLn2Hi64) - n * kLn2Lo64;
  f64x4 p = splat(kExpCoeffs[0]);
#pragma GCC unroll 16
  for (int i = 1; i < 14; ++i) p = p * r + kExpCoeffs[i];
  u64x4 bits;
  memcpy(&bits, &t, sizeof bits);
  bits = (bits << 52) + (uint64_t{1023} << 52);
  f64x4 power;
  memcpy(&power, &bits, sizeof power);
  return x < kExpMin ? splat(0.0) : p * power;
}

RL_INLINE double exp64(double x) { return exp64x4(splat(x))[0]; }

// Natural logarithm of a normal positive number.
RL_INLINE double log64(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  double n = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1022);
  bits = (bits & 0x000fffffffffffffu) | 0x3fe0000000000000u;
  double m;
  memcpy(&m, &bits, 8);
  if (m < 0.70710678118654757) {
    m *= 2.0;
    n -= 1.0;
  }
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double p = 1.0 / 23.0;
#pragma GCC unroll 16
  for (int i = 21; i > 1; i -= 2) p = p * z + 1.0 / i;
  const double s2 = s + s;
  return n * kLn2Hi64 + (s2 + (s2 * (z * p) + n * kLn2Lo64));
}

RL_INLINE uint64_t noise_bits(uint64_t key, int32_t id) {
  uint64_t h = key + (static_cast<uint64_t>(id) + 1) * kGamma;
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return (h ^ (h >> 31)) >> 12;
}

RL_INLINE double gumbel(uint64_t bits) { return -log64(-log64((static_cast<double>(bits) + 0.5) * 0x1p-52)); }

// An upper bound of `gumbel(bits)`, with room for rounding.
RL_INLINE double gumbel_bound(uint64_t bits) {
  const uint64_t left = 0x000fffffffffffffu - bits;  // (1 - u) * 2^52 - 0.5
  const int log2 = left == 0 ? -1 : 63 - __builtin_clzll(left);
  return (52 - log2) * 0.6931471805599454 + 1e-9;
}

// Maximum of the row; NaN when any value is NaN.
RL_INLINE float row_max(const float* row, int n) {
  f32x8 top0 = set1(-__builtin_inff()), top1 = top0, sum = set1(0.0f);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x8 a = load(row + i), b = load(row + i + 8);
    top0 = max(a, top0);
    top1 = max(b, top1);
    sum = add(sum, add(mul(a, set1(0.0f)), mul(b, set1(0.0f))));  // 0 * x is NaN for NaN and infinities only
  }
  float best = hmax(max(top0, top1));
  bool odd = !(hsum(sum) == 0.0f);
  for (; i < n; ++i) {
    best = max1(row[i], best);
    odd |= row[i] != row[i];
  }
  if (odd) {
    for (int j = 0; j < n; ++j) {
      if (row[j] != row[j]) return row[j];
    }
  }
  return best;
}

RL_INLINE int first_equal(const float* row, int n, float value) {
  int i = 0;
  while (i < n && row[i] != value) ++i;
  return i < n ? i : 0;
}

// sum(exp((row - best) / temperature)), 8 lanes as the definition has them.
RL_INLINE double mass(const float* row, int n, double best, double temperature) {
  f64x4 low = splat(0.0), high = splat(0.0);
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    f32x4 a, b;
    memcpy(&a, row + i, 16);
    memcpy(&b, row + i + 4, 16);
    low += exp64x4((__builtin_convertvector(a, f64x4) - best) / temperature);
    high += exp64x4((__builtin_convertvector(b, f64x4) - best) / temperature);
  }
  for (int l = 0; i < n; ++i, ++l) {
    const double e = exp64((static_cast<double>(row[i]) - best) / temperature);
    l < 4 ? low[l] += e : high[l - 4] += e;
  }
  const f64x4 s = low + high;
  return (s[0] + s[2]) + (s[1] + s[3]);
}

RL_INLINE double log_sum_exp(const float* row, int n, double best) { return best + log64(mass(row, n, best, 1.0)); }

// The n best of the row, best first, lowest id on ties. `room` holds `vocab` candidates.
int select_best(const float* row, int vocab, int n, Candidate* room) {
  n = std::min(n, vocab);
  if (n <= 0) return 0;
  if (n > kInsertionMax) {
    for (int i = 0; i < vocab; ++i) room[i] = {row[i], i};
    if (n < vocab) std::nth_element(room, room + n, room + vocab, Better());
    std::sort(room, room + n, Better());
    return n;
  }
  int held = 0;
  for (int i = 0; i < vocab; ++i) {
    if (held == n && !(row[i] > room[n - 1].value)) continue;
    int at = held < n ? held++ : n - 1;
    for (; at > 0 && row[i] > room[at - 1].value; --at) room[at] = room[at - 1];
    room[at] = {row[i], i};
  }
  return n;
}

RL_INLINE float narrow(double x) {
  if (x == -__builtin_inf()) return -__builtin_inff();
  return static_cast<float>(x < -kFloatMax ? -kFloatMax : x > kFloatMax ? kFloatMax : x);
}

bool has_edits(const SampleTask& t) { return t.num_allowed >= 0 || t.num_stop > 0 || t.num_bias > 0 || t.num_counts > 0; }

// Allowed ids, min_tokens mask, logit_bias, penalties, in that order. `room` holds `vocab` floats.
void apply_edits(float* row, int vocab, const SampleTask& t, float* room) {
  if (t.num_allowed >= 0) {
    for (int i = 0; i < t.num_allowed; ++i) room[i] = row[t.allowed_ids[i]];
    for (int i = 0; i < vocab; ++i) row[i] = -__builtin_inff();
    for (int i = 0; i < t.num_allowed; ++i) row[t.allowed_ids[i]] = room[i];
  }
  for (int i = 0; i < t.num_stop; ++i) row[t.stop_ids[i]] = -__builtin_inff();
  for (int i = 0; i < t.num_bias; ++i) {
    float& x = row[t.bias_ids[i]];
    x = narrow(static_cast<double>(x) + static_cast<double>(t.bias_values[i]));
  }
  for (int i = 0; i < t.num_counts; ++i) {
    float& to = row[t.count_ids[i]];
    double x = static_cast<double>(to);
    x = x > 0 ? x / t.repetition : x * t.repetition;
    const double count = t.count_out[i];
    to = narrow((x - t.frequency * count) - t.presence * (count > 0 ? 1.0 : 0.0));
  }
}

// The best score so far; ties go to the lowest id.
struct Winner {
  double score;
  int32_t id;
};

RL_INLINE void challenge(Winner& w, const SampleTask& t, double z, int32_t id) {
  const uint64_t bits = noise_bits(t.noise_key, id);
  if (z + gumbel_bound(bits) < w.score) return;
  const double score = z + gumbel(bits);
  if (score < w.score || (score == w.score && id > w.id)) return;
  if (t.min_p > 0.0 && exp64(z) < t.min_p) return;
  w = {score, id};
}

// How many of the sorted candidates the nucleus keeps; 0 = all of them are not enough yet.
int nucleus(const Candidate* c, int n, const SampleTask& t, double best, double total) {
  const double wanted = t.top_p * total;
  double before = 0.0;
  for (int i = 0; i < n; ++i) {
    if (i > 0 && !(before < wanted)) return i;
    before += exp64((static_cast<double>(c[i].value) - best) / t.temperature);
  }
  return before < wanted ? 0 : n;
}

// The nucleus of a flat distribution: all candidates dealt to buckets of falling logits, buckets sorted one after another until the mass is reached.
// Leaves the kept ones at the front of `room`, best first, and returns their number.
int nucleus_by_buckets(const float* row, int vocab, const SampleTask& t, double best, double total, Candidate* room) {
  float lowest = static_cast<float>(best);
  for (int i = 0; i < vocab; ++i) lowest = row[i] < lowest && row[i] > -__builtin_inff() ? row[i] : lowest;
  const double span = (best - static_cast<double>(lowest)) / t.temperature;
  const double scale = (kBuckets - 1) / std::max(std::min(span, 40.0), 1e-30) / t.temperature;
  int32_t end[kBuckets + 1] = {};
  const auto bucket = [&](float x) { return static_cast<int>(std::min((best - static_cast<double>(x)) * scale, kBuckets - 1.0)); };
  for (int i = 0; i < vocab; ++i) ++end[bucket(row[i]) + 1];
  for (int b = 0; b < kBuckets; ++b) end[b + 1] += end[b];
  for (int i = 0; i < vocab; ++i) room[end[bucket(row[i])]++] = {row[i], i};
  const double wanted = t.top_p * total;
  double before = 0.0;
  for (int b = 0, i = 0; b < kBuckets; ++b) {
    std::sort(room + i, room + end[b], Better());
    for (; i < end[b]; ++i) {
      if (i > 0 && !(before < wanted)) return i;
      before += exp64((static_cast<double>(room[i].value) - best) / t.temperature);
    }
  }
  return vocab;
}

int draw_filtered(const float* row, int vocab, const SampleTask& t, double best, Candidate* room) {
  int kept;
  if (t.top_k > 0) {
    kept = select_best(row, vocab, t.top_k, room);
    if (t.top_p < 1.0) {
      double total = 0.0;
      for (int i = 0; i < kept; ++i) total += exp64((static_cast<double>(room[i].value) - best) / t.temperature);
      const int in = nucleus(room, kept, t, best, total);
      if (in > 0) kept = in;
    }
  } else {
    const double total = mass(row, vocab, best, t.temperature);
    kept = nucleus(room, select_best(row, vocab, kFirstGuess, room), t, best, total);
    if (kept == 0) kept = nucleus_by_buckets(row, vocab, t, best, total, room);
  }
  Winner w{-__builtin_inf(), room[0].id};
  for (int i = 0; i < kept; ++i) challenge(w, t, (static_cast<double>(room[i].value) - best) / t.temperature, room[i].id);
  return w.id;
}

int draw(const float* row, int vocab, const SampleTask& t, float best, Candidate* room) {
  const int top = first_equal(row, vocab, best);
  if (t.greedy) return top;
  const double shift = static_cast<double>(best);
  if (t.top_k > 0 || t.top_p < 1.0) return draw_filtered(row, vocab, t, shift, room);
  Winner w{-__builtin_inf(), top};
  challenge(w, t, 0.0, top);
  const double reach = 36.75 * t.temperature;  // no noise exceeds 53 ln 2
  for (int i = 0; i < vocab; ++i) {
    const double below = static_cast<double>(row[i]) - shift;
    if (below < w.score * t.temperature - reach) continue;
    challenge(w, t, below / t.temperature, i);
  }
  return w.id;
}

// lse, the alternatives, and the asked ids of a raw row. Returns the log-sum-exp.
double report(const float* row, int vocab, float best, int top_n, Candidate* room, int32_t* ids, double* values) {
  const double lse = log_sum_exp(row, vocab, static_cast<double>(best));
  const int n = select_best(row, vocab, top_n, room);
  for (int i = 0; i < n; ++i) {
    ids[i] = room[i].id;
    values[i] = static_cast<double>(room[i].value) - lse;
  }
  return lse;
}

bool usable(float best) { return best == best && best < __builtin_inff() && best > -__builtin_inff(); }

struct Drawn {
  int32_t token;
  int32_t status;
};

Drawn sample_row(float* row, int vocab, SampleTask& t, char* scratch) {
  auto* room = reinterpret_cast<Candidate*>(scratch);
  auto* raw = reinterpret_cast<float*>(room + vocab);
  float best = row_max(row, vocab);
  if (!usable(best)) return {0, kNotFinite};
  double lse = 0.0;
  const float* untouched = row;
  if (t.top_n >= 0) {
    lse = report(row, vocab, best, t.top_n, room, t.top_ids, t.top_logprobs);
    t.num_top = std::min(t.top_n, vocab) + t.num_extra;
    for (int i = 0; i < t.num_extra; ++i) {
      t.top_ids[t.num_top - t.num_extra + i] = t.extra_ids[i];
      t.top_logprobs[t.num_top - t.num_extra + i] = static_cast<double>(row[t.extra_ids[i]]) - lse;
    }
  }
  if (has_edits(t)) {
    if (t.top_n >= 0) {
      memcpy(raw, row, sizeof(float) * static_cast<size_t>(vocab));
      untouched = raw;
    }
    apply_edits(row, vocab, t, reinterpret_cast<float*>(room));
    best = row_max(row, vocab);
    if (best == -__builtin_inff()) return {0, kNothingAllowed};
  }
  const int token = draw(row, vocab, t, best, room);
  if (t.top_n >= 0) t.logprob = static_cast<double>(untouched[token]) - lse;
  return {token, kSampleOk};
}

void sample(const void* p, Worker& w) {
  const auto& a = *static_cast<const SampleArgs*>(p);
  char* scratch = static_cast<char*>(w.scratch((sizeof(Candidate) + sizeof(float)) * static_cast<size_t>(a.vocab)));
  for (int r = w.take(); r < *a.num_tasks; r = w.take()) {
    SampleTask& t = a.tasks[r];
    const Drawn d = sample_row(a.logits + r * a.stride, a.vocab, t, scratch);
    a.tokens[r] = d.token;
    a.status[r] = d.status;
    a.relay[t.pool_row] = d.token;
    if (d.status == kSampleOk) a.state->after_draw(t.pool_row, d.token);
  }
}

void raw_logprobs(const void* p, Worker& w) {
  const auto& a = *static_cast<const LogprobArgs*>(p);
  auto* room = static_cast<Candidate*>(w.scratch(sizeof(Candidate) * static_cast<size_t>(a.vocab)));
  for (int r = w.take(); r < a.rows; r = w.take()) {
    const float* row = a.logits + r * a.stride;
    const float best = row_max(row, a.vocab);
    a.status[r] = usable(best) ? kSampleOk : kNotFinite;
    if (a.status[r] != kSampleOk) continue;
    const int64_t at = static_cast<int64_t>(r) * a.top_n;
    const double lse = report(row, a.vocab, best, a.top_n, room, a.top_ids + at, a.top_logprobs + at);
    a.logprob[r] = static_cast<double>(row[a.targets[r]]) - lse;
  }
}

ROOTLET_OP(sample);
ROOTLET_OP(raw_logprobs);

}  // namespace
}  // namespace rootlet::ROOTLET_ISA
