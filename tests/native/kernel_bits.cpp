// Runs the kernels on seeded inputs once for each instruction set of this machine, and compares every byte with the scalar set, which is the definition.
// One line a case: "case NAME HASH", or "differs NAME ISA BYTE". Hashes of two machines are comparable: inputs are integers scaled by powers of two.
// Exit status 1 when anything differs.
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define ROOTLET_ISA bits_test
#include "rootlet/attention.h"
#include "rootlet/dispatch.h"
#include "rootlet/elementwise.h"
#include "rootlet/half.h"
#include "rootlet/linear.h"
#include "rootlet/packed.h"
#include "rootlet/threads.h"

using namespace rootlet;
using rootlet::bits_test::f32_to_f16;
using rootlet::bits_test::float_of;

namespace {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  // In [-2^log2, 2^log2), 24 bits.
  float real(int log2 = 0) { return static_cast<float>(static_cast<int32_t>(next()) >> 8) * float_of(static_cast<uint32_t>(127 - 23 + log2) << 23); }
  Floats reals(size_t n, int log2 = 0) {
    Floats x(n);
    for (float& y : x) y = real(log2);
    return x;
  }

 private:
  uint64_t state_;
};

// Zeros, subnormals, the ends of half precision and of exp, infinities and NaN among ordinary numbers.
Floats odd_numbers(size_t n) {
  static const uint32_t kOdd[] = {0,          0x80000000u, 1,           0x007fffffu, 0x33000000u, 0x33000001u, 0x387fffffu, 0x38800000u, 0x477fefffu,
                                  0x477ff000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f7fffffu, 0xc2aea8f6u, 0xc2aea8f7u, 0x42b0bd71u, 0xffc12345u};
  Random random(3);
  Floats x = random.reals(n, 4);
  for (size_t i = 0; i < n; i += 3) x[i] = float_of(kOdd[i / 3 % (sizeof kOdd / sizeof kOdd[0])]);
  return x;
}

template <class T>
void append(Bytes& to, const std::vector<T>& x) {
  const auto* p = reinterpret_cast<const uint8_t*>(x.data());
  to.insert(to.end(), p, p + x.size() * sizeof(T));
}

template <class Args>
void run(const std::string& name, const Args& args) {
  OpRef ref(name.c_str());
  const Op op{ref.fn(), &args};
  run_ops(&op, 1, nullptr);
}

// ---- linear layers

struct Kind {
  WeightKind kind;
  const char* name;
};
constexpr Kind kKinds[] = {{WeightKind::kF32, "f32"},   {WeightKind::kF16, "f16"},   {WeightKind::kBF16, "bf16"}, {WeightKind::kQ4_0, "q4_0"},
                           {WeightKind::kQ4_1, "q4_1"}, {WeightKind::kQ5_0, "q5_0"}, {WeightKind::kQ5_1, "q5_1"}, {WeightKind::kQ8_0, "q8_0"}};

// Rows as a file has them. `fill` >= 0: every quant byte is that, the largest magnitudes a format can hold.
Bytes weight_rows(WeightKind kind, int n, int k, int fill) {
  Random random(5);
  Bytes bytes(static_cast<size_t>(n) * row_bytes(kind, k));
  if (!is_block_kind(kind)) {
    const size_t size = kind == WeightKind::kF32 ? 4 : 2;
    for (size_t at = 0; at < bytes.size(); at += size) {
      const float x = random.real();
      const uint16_t half = f32_to_f16(x);
      const auto* top = reinterpret_cast<const uint8_t*>(&x) + (kind == WeightKind::kBF16 ? 2 : 0);
      memcpy(&bytes[at], kind == WeightKind::kF16 ? reinterpret_cast<const uint8_t*>(&half) : top, size);
    }
    return bytes;
  }
  const size_t block = row_bytes(kind, kQuantBlock);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(fill >= 0 ? fill : static_cast<int>(random.next() & 255u));
  for (size_t at = 0; at < bytes.size(); at += block) {
    const uint16_t scales[] = {f32_to_f16(random.real(-4)), f32_to_f16(random.real(-2))};
    memcpy(&bytes[at], scales, kind == WeightKind::kQ4_1 || kind == WeightKind::kQ5_1 ? 4 : 2);
  }
  return bytes;
}

struct Quantised {
  std::vector<int8_t> q, low;
  std::vector<ActScale> scales;
  Quantised(int rows, int k) : q(static_cast<size_t>(rows * k)), low(q.size()), scales(static_cast<size_t>(rows * k / kQuantBlock)) {}
};

Quantised quantised(const Floats& x, int rows, int k, bool two_planes) {
  Quantised to(rows, k);
  run("quantize", QuantizeArgs{{nullptr, rows}, k, x.data(), k, to.q.data(), two_planes ? to.low.data() : nullptr, to.scales.data()});
  return to;
}

// What norms make: in two rows of three one block stands out, not always the same.
void add_outliers(Floats& x, int rows, int k) {
  for (int r = 0; r < rows; ++r) {
    if (r % 3) x[static_cast<size_t>(r * k + (r * 137 + 5) % k)] *= 64.0f;
  }
}

void append(Bytes& to, const Quantised& x) {
  append(to, x.q);
  append(to, x.low);
  append(to, x.scales);
}

// `rows` 1 to 9 by every tile height; bias and residual on odd counts.
Bytes linear(const Kind& kind, int fill, bool two_planes = false) {
  const int n = 72, k = 352;  // more blocks than share a byte of marks
  Bytes out;
  const PackedWeight weight(kind.kind, n, k, weight_rows(kind.kind, n, k, fill).data());
  for (int rows = 1; rows <= 9; ++rows) {
    Random random(static_cast<uint64_t>(rows));
    Floats x = fill >= 0 ? Floats(static_cast<size_t>(rows * k), 1.0f) : random.reals(static_cast<size_t>(rows * k), 2);
    const Floats bias = random.reals(n), residual = random.reals(static_cast<size_t>(rows * n));
    Floats y(static_cast<size_t>(rows * n));
    if (two_planes) add_outliers(x, rows, k);
    Quantised q = quantised(x, rows, k, two_planes);
    const bool more = rows % 2;
    LinearArgs a{{nullptr, rows}, n, k, weight.data(), x.data(), k, q.q.data(), two_planes ? q.low.data() : nullptr, q.scales.data(), more ? bias.data() : nullptr,
                 more ? residual.data() : nullptr, n, y.data(), {}};
    run(std::string("gemm_") + kind.name, a);
    append(out, y);
    append(out, q);
  }
  return out;
}

// A norm, the gate-up linear, silu * mul and quantisation in one.
Bytes gated(const Kind& kind) {
  const int inner = 64, k = 352;
  Bytes out;
  const PackedWeight weight(kind.kind, 2 * inner, k, weight_rows(kind.kind, 2 * inner, k, -1).data());
  for (int rows : {1, 3, 6, 40}) {
    Random random(static_cast<uint64_t>(rows));
    Floats x = random.reals(static_cast<size_t>(rows * k));
    add_outliers(x, rows, k);
    const Floats norm = random.reals(static_cast<size_t>(k));
    Floats sums(static_cast<size_t>(rows * 2 * inner)), product(static_cast<size_t>(rows * inner));
    Quantised in(rows, k), to(rows, inner);
    const NormArgs begin{{nullptr, rows}, 1, k, x.data(), k, norm.data(), 1e-5f, nullptr, in.q.data(), in.low.data(), in.scales.data()};
    const LinearArgs a{{nullptr, rows}, 2 * inner, k, weight.data(), nullptr, k, in.q.data(), in.low.data(), in.scales.data(), nullptr, nullptr, 0, sums.data(), begin};
    run(std::string("gated_") + kind.name, GatedArgs{a, product.data(), to.q.data(), to.scales.data()});
    append(out, sums);
    append(out, product);
    append(out, in);
    append(out, to);
  }
  return out;
}

// ---- rows

Bytes odd_quantise() {
  const int k = 32 * 54;  // each odd number meets each place of a block
  Bytes out;
  for (bool two_planes : {false, true}) append(out, quantised(odd_numbers(k), 1, k, two_planes));
  Floats finite = odd_numbers(k);
  for (float& x : finite) x = x < 1e30f && x > -1e30f ? x : 1.0f;  // larger ones add up to inf: then no block stands out
  append(out, quantised(finite, 1, k, true));
  return out;
}

Bytes rms_norm() {
  Bytes out;
  for (int n : {3, 8, 20, 96, 100}) {
    Random random(static_cast<uint64_t>(n));
    const Floats x = random.reals(static_cast<size_t>(5 * n), 3), weight = random.reals(static_cast<size_t>(n));
    Floats y(static_cast<size_t>(5 * n));
    run("rms_norm", NormArgs{{nullptr, 5}, 1, n, x.data(), n, weight.data(), 1e-6f, y.data(), nullptr, nullptr, nullptr});
    append(out, y);
  }
  return out;
}

Bytes rope() {
  Bytes out;
  const int rows = 4, heads = 3, dim = 44, rotary = 36, length = 9;
  Random random(7);
  const Floats x = random.reals(static_cast<size_t>(rows * heads * dim)), table = random.reals(static_cast<size_t>(length * rotary));
  const int32_t positions[rows] = {0, 8, 5, 9};  // the last is outside
  for (int interleaved : {0, 1}) {
    Floats y(x.size());
    run("rope", RopeArgs{{nullptr, rows}, heads, dim, rotary, length, interleaved, x.data(), heads * dim, positions, table.data(), y.data()});
    append(out, y);
  }
  return out;
}

// `one_nan`: the sign of a NaN that an operation makes is the processor's choice, so between machines each NaN counts as the same.
Bytes silu(const Floats& x, bool one_nan = false) {
  const int n = 300;
  Floats y(n);
  run("silu_and_mul", SiluArgs{{nullptr, 1}, n, x.data(), 2 * n, y.data(), nullptr, nullptr});
  for (float& v : y) v = one_nan && v != v ? float_of(0x7fc00000u) : v;
  Bytes out;
  append(out, y);
  return out;
}

// All 65,536 halves, one by one and eight at once.
Bytes every_half() {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  const int32_t id = 0;
  Floats wide(halves.size()), product(halves.size());
  const auto* bytes = reinterpret_cast<const uint8_t*>(halves.data());
  run("embedding", EmbeddingArgs{{nullptr, 1}, WeightKind::kF16, 1, 65536, &id, bytes, wide.data()});
  const PackedWeight weight(WeightKind::kF16, 65536, 1, bytes);
  const float one = 1.0f;
  run("gemm_f16", LinearArgs{{nullptr, 1}, 65536, 1, weight.data(), &one, 1, nullptr, nullptr, nullptr, nullptr, nullptr, 0, product.data(), {}});
  Bytes out;
  append(out, wide);
  append(out, product);
  return out;
}

// ---- attention

struct Shape {
  int heads, kv_heads, dim, window;
};

constexpr int kPage = 32, kPages = 12, kKeys = 300;

struct Pool {
  Bytes k, v;
  Floats k_scales, v_scales;
  KvKind kind;
};

Pool filled_pool(const Shape& s, KvKind kind, const Floats& k, const Floats& v, const std::vector<int32_t>& table) {
  const size_t values = static_cast<size_t>(kPages * kPage * s.kv_heads * s.dim), scales = static_cast<size_t>(kPages * kPage * s.kv_heads);
  const size_t size = kind == KvKind::kF32 ? 4 : kind == KvKind::kF16 ? 2 : 1;
  Pool pool{Bytes(values * size), Bytes(values * size), Floats(scales), Floats(scales), kind};
  std::vector<int32_t> slots(kKeys);
  for (int t = 0; t < kKeys; ++t) slots[t] = table[t / kPage] * kPage + t % kPage;
  const int64_t stride = s.kv_heads * s.dim;
  run("store_kv", StoreKvArgs{k.data(), v.data(), stride, stride, pool.k.data(), pool.v.data(), pool.k_scales.data(), pool.v_scales.data(),
                              slots.data(), {nullptr, kKeys}, s.kv_heads, s.dim, kPage, kind});
  return pool;
}

// The last `queries` tokens of one request attend: many are cut into items of 16, one is split over the team by keys.
void attend(const Shape& s, const Pool& pool, const std::vector<int32_t>& table, int queries, Bytes& out) {
  Random random(13);
  const size_t count = static_cast<size_t>(queries * s.heads * s.dim);
  const Floats q = random.reals(count, 1);
  Floats y(count), partials(1 << 16);
  Quantised blocks(queries, s.heads * s.dim);
  const bool quantise = s.dim % kQuantBlock == 0;
  const int32_t row = 0, indptr[] = {0, queries}, prefix = kKeys - queries;
  std::vector<int32_t> work;
  for (int begin = 0; begin < queries; begin += 16) {
    const int n = queries - begin < 16 ? queries - begin : 16;
    for (int h = 0; h < s.kv_heads; ++h) work.insert(work.end(), {begin, n, h, 0, 0, prefix + begin + n, 0, 0});
  }
  const auto num_work = static_cast<int32_t>(work.size() / kWorkItemWords);
  run("attention", AttentionArgs{q.data(), s.heads * s.dim, y.data(), pool.k.data(), pool.v.data(), pool.k_scales.data(), pool.v_scales.data(),
                                 table.data(), &row, indptr, &prefix, &row, work.data(), &num_work, partials.data(),
                                 static_cast<int64_t>(partials.size()), kPages, s.heads, s.kv_heads, s.dim, kPage, pool.kind, s.window, 0.125f,
                                 quantise ? blocks.q.data() : nullptr, quantise ? blocks.scales.data() : nullptr});
  append(out, y);
  append(out, blocks);
}

Bytes attention(KvKind kind) {
  Bytes out;
  std::vector<int32_t> table(kPages);
  for (int i = 0; i < kPages; ++i) table[i] = (i * 5 + 3) % kPages;
  for (const Shape& s : {Shape{9, 3, 64, 0}, Shape{7, 1, 24, 33}, Shape{2, 2, 128, 0}, Shape{5, 5, 20, 130}}) {
    Random random(11);
    const size_t values = static_cast<size_t>(kKeys * s.kv_heads * s.dim);
    const Floats k = random.reals(values, 1), v = random.reals(values);
    const Pool pool = filled_pool(s, kind, k, v, table);
    for (const Bytes* bytes : {&pool.k, &pool.v}) append(out, *bytes);
    append(out, pool.k_scales);
    append(out, pool.v_scales);
    for (int queries : {140, 1}) attend(s, pool, table, queries, out);
  }
  return out;
}

Bytes odd_store(KvKind kind) {
  const Shape s{1, 1, 24, 0};
  std::vector<int32_t> table(kPages);
  for (int i = 0; i < kPages; ++i) table[i] = i;
  const Floats x = odd_numbers(kKeys * 24);
  const Pool pool = filled_pool(s, kind, x, x, table);
  Bytes out = pool.k;
  append(out, pool.v);
  append(out, pool.k_scales);
  return out;
}

// ---- the run

std::vector<std::string> sets() {
  std::vector<std::string> names{""};
  for (const char* p = usable_isas(); *p; ++p) {
    if (*p == ',') {
      names.emplace_back();
    } else {
      names.back() += *p;
    }
  }
  return names;
}

uint64_t hash_of(const Bytes& bytes) {
  uint64_t h = 14695981039346656037u;
  for (uint8_t b : bytes) h = (h ^ b) * 1099511628211u;
  return h;
}

bool same_bits(const std::string& name, const std::function<Bytes()>& make) {
  const std::vector<std::string> isas = sets();
  Bytes want;
  bool same = true;
  for (const std::string& isa : isas) {
    force_isa(isa.c_str());
    const Bytes got = make();
    if (isa == isas.front()) want = got;
    size_t at = 0;
    while (at < got.size() && got[at] == want[at]) ++at;
    if (at < got.size()) printf("differs %s %s %zu\n", name.c_str(), isa.c_str(), at);
    same = same && at == got.size();
  }
  printf("case %s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash_of(want)));
  return same;
}

}  // namespace

int main() {
  set_team(2, false);
  printf("sets %s\n", usable_isas());
  bool same = true;
  for (const Kind& kind : kKinds) {
    same &= same_bits(std::string("linear-") + kind.name, [&] { return linear(kind, -1); });
    if (!is_block_kind(kind.kind)) continue;
    const int largest = kind.kind == WeightKind::kQ8_0 ? 128 : 255;
    same &= same_bits(std::string("largest-") + kind.name, [&] { return linear(kind, largest); });
    same &= same_bits(std::string("outliers-") + kind.name, [&] { return linear(kind, -1, true); });
    same &= same_bits(std::string("gated-") + kind.name, [&] { return gated(kind); });
  }
  same &= same_bits("quantize-odd", odd_quantise);
  same &= same_bits("rms_norm", rms_norm);
  same &= same_bits("rope", rope);
  same &= same_bits("silu", [] { return silu(Random(17).reals(600, 6)); });
  same &= same_bits("silu-odd", [] { return silu(odd_numbers(600)); });
  same &= same_bits("silu-odd-one-nan", [] { return silu(odd_numbers(600), true); });
  same &= same_bits("halves", every_half);
  const char* const pages[] = {"f32", "f16", "int8"};
  for (int i = 0; i < 3; ++i) {
    const auto kind = static_cast<KvKind>(i);
    same &= same_bits(std::string("attention-") + pages[i], [=] { return attention(kind); });
    same &= same_bits(std::string("store-odd-") + pages[i], [=] { return odd_store(kind); });
  }
  return same ? 0 : 1;
}
