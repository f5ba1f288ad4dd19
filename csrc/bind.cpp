// The one file that knows Python. Every op is a function (tape or None, ...): with a tape it is recorded, without one it runs at once. Tensors arrive
// as addresses; shapes, dtypes and strides were checked by kernels/cpu/table.py, which keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "rootlet/attention.h"
#include "rootlet/calibrate.h"
#include "rootlet/dispatch.h"
#include "rootlet/elementwise.h"
#include "rootlet/fuse.h"
#include "rootlet/graph.h"
#include "rootlet/linear.h"
#include "rootlet/packed.h"
#include "rootlet/sample.h"
#include "rootlet/threads.h"

namespace nb = nanobind;
using namespace nb::literals;
using rootlet::Count;
using rootlet::OpRef;
using rootlet::PackedWeight;
using rootlet::RowSpace;
using rootlet::SampleRow;
using rootlet::SamplerState;
using rootlet::Tape;

namespace {

using Address = uintptr_t;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
T* at(Address a) {
  return reinterpret_cast<T*>(a);
}

// `space` -1 = fixed at `rows`; else the header count that a captured op follows.
Count count_of(Tape* tape, int rows, int space) {
  return tape ? tape->count(static_cast<RowSpace>(space), rows) : Count{nullptr, rows};
}

template <class Args>
void submit(Tape* tape, OpRef& op, const Args& args) {
  static_assert(std::is_trivially_copyable_v<Args>);
  if (tape) {
    tape->append(op.name(), op.fn(), &args, sizeof args);
  } else {
    const rootlet::Op one{op.fn(), &args};
    nb::gil_scoped_release release;
    rootlet::run_ops(&one, 1, nullptr);
  }
}

void bind_tape(nb::module_& m) {
  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("__len__", &Tape::size)
      .def(
          "replay",
          [](Tape& t, int tokens, int logit_rows, bool profile) {
            t.replay(rootlet::StepHeader{tokens, logit_rows}, profile);
          },
          "num_tokens"_a, "num_logit_rows"_a, "profile"_a = false, nb::call_guard<nb::gil_scoped_release>())
      .def("materialise", &Tape::materialise, "address"_a)
      .def("reset_profile", &Tape::reset_timers)
      .def("profile", [](const Tape& t) {
        std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>> out;
        for (size_t i = 0; i < t.size(); ++i) out.emplace_back(t.name(i), t.timer(i).calls, t.timer(i).ns, t.timer(i).wait_ns);
        return out;
      });
}

void bind_team(nb::module_& m) {
  m.def("team_size", &rootlet::team_size);
  m.def("set_team", &rootlet::set_team, "size"_a, "pin"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("num_usable_cpus", &rootlet::num_usable_cpus);
  m.def("force_isa", [](const std::string& name) { rootlet::force_isa(name.c_str()); });
  m.def("current_isa", &rootlet::current_isa);
  m.def("usable_isas", &rootlet::usable_isas);
}

int64_t calibrate(OpRef& op, rootlet::CalibrateArgs a) {
  std::vector<int64_t> done(static_cast<size_t>(rootlet::team_size()));
  a.done = done.data();
  submit(nullptr, op, a);
  return std::accumulate(done.begin(), done.end(), int64_t{0});
}

void bind_calibrate(nb::module_& m) {
  m.def(
      "calibrate_multiply",
      [](int64_t rounds) {
        static OpRef op("calibrate_multiply");
        return calibrate(op, {rounds, nullptr, 0, nullptr});
      },
      "rounds"_a);
  m.def(
      "calibrate_read",
      [](Address floats, int count) {
        static OpRef op("calibrate_read");
        return calibrate(op, {0, at<float>(floats), count, nullptr});
      },
      "floats"_a, "count"_a);
}

void bind_elementwise(nb::module_& m) {
  m.def(
      "embedding",
      [](Tape* tape, int kind, Address ids, Address table, Address out, int rows, int space, int vocab, int k) {
        static OpRef op("embedding");
        submit(tape, op,
               rootlet::EmbeddingArgs{count_of(tape, rows, space), static_cast<rootlet::WeightKind>(kind), vocab, k, at<int32_t>(ids),
                                      at<uint8_t>(table), at<float>(out)});
      },
      "tape"_a.none(), "kind"_a, "ids"_a, "table"_a, "out"_a, "rows"_a, "space"_a, "vocab"_a, "k"_a);
  m.def(
      "rms_norm",
      [](Tape* tape, Address x, int64_t x_stride, Address weight, Address out, int rows, int space, int heads, int n, float eps) {
        static OpRef op("rms_norm");
        submit(tape, op,
               rootlet::NormArgs{count_of(tape, rows, space), heads, n, at<float>(x), x_stride, at<float>(weight), eps, at<float>(out), nullptr, nullptr, nullptr});
      },
      "tape"_a.none(), "x"_a, "x_stride"_a, "weight"_a, "out"_a, "rows"_a, "space"_a, "heads"_a, "n"_a, "eps"_a);
  m.def(
      "rope",
      [](Tape* tape, Address x, int64_t x_stride, Address positions, Address cos_sin, Address out, int rows, int space, int heads, int head_dim,
         int rotary_dim, int max_len, bool interleaved) {
        static OpRef op("rope");
        submit(tape, op,
               rootlet::RopeArgs{count_of(tape, rows, space), heads, head_dim, rotary_dim, max_len, interleaved, at<float>(x), x_stride,
                                 at<int32_t>(positions), at<float>(cos_sin), at<float>(out)});
      },
      "tape"_a.none(), "x"_a, "x_stride"_a, "positions"_a, "cos_sin"_a, "out"_a, "rows"_a, "space"_a, "heads"_a, "head_dim"_a, "rotary_dim"_a,
      "max_len"_a, "interleaved"_a);
  m.def(
      "silu_and_mul",
      [](Tape* tape, Address x, int64_t x_stride, Address out, int rows, int space, int n) {
        static OpRef op("silu_and_mul");
        submit(tape, op, rootlet::SiluArgs{count_of(tape, rows, space), n, at<float>(x), x_stride, at<float>(out), nullptr, nullptr});
      },
      "tape"_a.none(), "x"_a, "x_stride"_a, "out"_a, "rows"_a, "space"_a, "n"_a);
  m.def(
      "gather_rows",
      [](Tape* tape, Address x, int64_t x_stride, Address index, Address out, int rows, int space, int n, int num_source_rows) {
        static OpRef op("gather_rows");
        submit(tape, op,
               rootlet::GatherArgs{count_of(tape, rows, space), n, num_source_rows, at<float>(x), x_stride, at<int32_t>(index), at<float>(out)});
      },
      "tape"_a.none(), "x"_a, "x_stride"_a, "index"_a, "out"_a, "rows"_a, "space"_a, "n"_a, "num_source_rows"_a);
}

OpRef& gemm_op(rootlet::WeightKind kind) {
  static OpRef ops[] = {OpRef("gemm_f32"),  OpRef("gemm_f16"),  OpRef("gemm_bf16"), OpRef("gemm_q4_0"),
                        OpRef("gemm_q4_1"), OpRef("gemm_q5_0"), OpRef("gemm_q5_1"), OpRef("gemm_q8_0")};
  return ops[static_cast<int>(kind)];
}

void bind_linear(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def_prop_ro("kind", [](const PackedWeight& w) { return static_cast<int>(w.kind()); })
      .def_prop_ro("n", &PackedWeight::n)
      .def_prop_ro("k", &PackedWeight::k)
      .def_prop_ro("nbytes", &PackedWeight::bytes);
  m.def(
      "pack",
      [](int kind, int n, int k, Address source) { return new PackedWeight(static_cast<rootlet::WeightKind>(kind), n, k, at<uint8_t>(source)); },
      "kind"_a, "n"_a, "k"_a, "source"_a, nb::rv_policy::take_ownership, nb::call_guard<nb::gil_scoped_release>());
  m.def("row_bytes", [](int kind, int k) { return rootlet::row_bytes(static_cast<rootlet::WeightKind>(kind), k); });
  m.def(
      "quantize",
      [](Tape* tape, Address x, int64_t x_stride, Address q, Address low, Address scales, int rows, int space,
         int k) -> std::optional<std::vector<Address>> {
        static OpRef op("quantize");
        const rootlet::QuantizeArgs a{count_of(tape, rows, space), k, at<float>(x), x_stride, at<int8_t>(q), at<int8_t>(low), at<rootlet::ActScale>(scales)};
        std::vector<Address> elided;
        if (tape && rootlet::fuse_quantize(*tape, a, elided)) return elided;
        submit(tape, op, a);
        return std::nullopt;
      },
      "tape"_a.none(), "x"_a, "x_stride"_a, "q"_a, "low"_a, "scales"_a, "rows"_a, "space"_a, "k"_a);
  m.def(
      "gemm",
      [](Tape* tape, const PackedWeight& w, Address x, int64_t x_stride, Address low, Address scales, Address bias, Address residual, int64_t residual_stride,
         Address out, int rows, int space) {
        rootlet::LinearArgs a{};
        a.rows = count_of(tape, rows, space);
        a.n = w.n();
        a.k = w.k();
        a.packed = w.data();
        a.x = at<float>(x);
        a.x_stride = x_stride;
        a.q = at<int8_t>(x);
        a.low = at<int8_t>(low);
        a.scales = at<rootlet::ActScale>(scales);
        a.bias = at<float>(bias);
        a.residual = at<float>(residual);
        a.residual_stride = residual_stride;
        a.out = at<float>(out);
        if (tape) rootlet::fuse_norm(*tape, a);
        submit(tape, gemm_op(w.kind()), a);
      },
      "tape"_a.none(), "w"_a, "x"_a, "x_stride"_a, "low"_a, "scales"_a, "bias"_a, "residual"_a, "residual_stride"_a, "out"_a, "rows"_a, "space"_a);
}

std::vector<int32_t> ids(const Ids& a) { return {a.data(), a.data() + a.size()}; }

void bind_attention(nb::module_& m) {
  m.def(
      "store_kv",
      [](Tape* tape, Address k, int64_t k_stride, Address v, int64_t v_stride, Address k_pages, Address v_pages, Address k_scales, Address v_scales,
         Address slots, int rows, int space, int kv_heads, int dim, int page_size, int kind) {
        static OpRef op("store_kv");
        const rootlet::StoreKvArgs a{at<float>(k), at<float>(v), k_stride, v_stride, at<void>(k_pages), at<void>(v_pages), at<float>(k_scales),
                                     at<float>(v_scales), at<int32_t>(slots), count_of(tape, rows, space), kv_heads, dim, page_size,
                                     static_cast<rootlet::KvKind>(kind)};
        if (!tape || !rootlet::fuse_store_kv(*tape, a)) submit(tape, op, a);
      },
      "tape"_a.none(), "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "k_pages"_a, "v_pages"_a, "k_scales"_a, "v_scales"_a, "slots"_a,
      "rows"_a, "space"_a, "kv_heads"_a, "dim"_a, "page_size"_a, "kind"_a);
  m.def(
      "attention",
      [](Tape* tape, Address q, int64_t q_stride, Address out, Address k_pages, Address v_pages, Address k_scales, Address v_scales,
         Address page_table, int64_t page_stride, Address row_ids, Address qo_indptr, Address prefix_lens, Address order, Address work, Address num_work, Address partials,
         int64_t num_partials, int heads, int kv_heads, int dim, int page_size, int kind, int window, float scale) {
        static OpRef op("attention");
        submit(tape, op,
               rootlet::AttentionArgs{at<float>(q), q_stride, at<float>(out), at<void>(k_pages), at<void>(v_pages), at<float>(k_scales),
                                      at<float>(v_scales), at<int32_t>(page_table), at<int32_t>(row_ids), at<int32_t>(qo_indptr),
                                      at<int32_t>(prefix_lens), at<int32_t>(order), at<int32_t>(work), at<int32_t>(num_work), at<float>(partials), num_partials,
                                      page_stride, heads, kv_heads, dim, page_size, static_cast<rootlet::KvKind>(kind), window, scale, nullptr,
                                      nullptr});
      },
      "tape"_a.none(), "q"_a, "q_stride"_a, "out"_a, "k_pages"_a, "v_pages"_a, "k_scales"_a, "v_scales"_a, "page_table"_a, "page_stride"_a,
      "row_ids"_a, "qo_indptr"_a, "prefix_lens"_a, "order"_a, "work"_a, "num_work"_a, "partials"_a, "num_partials"_a, "heads"_a, "kv_heads"_a, "dim"_a,
      "page_size"_a, "kind"_a, "window"_a, "scale"_a);
}

void bind_sampler_state(nb::module_& m) {
  nb::class_<SampleRow>(m, "SampleRow")
      .def(nb::init<>())
      .def_rw("seed", &SampleRow::seed)
      .def_rw("choice_index", &SampleRow::choice_index)
      .def_rw("drawn", &SampleRow::drawn)
      .def_rw("greedy", &SampleRow::greedy)
      .def_rw("top_k", &SampleRow::top_k)
      .def_rw("min_new_tokens", &SampleRow::min_new_tokens)
      .def_rw("top_n", &SampleRow::top_n)
      .def_rw("has_penalties", &SampleRow::has_penalties)
      .def_rw("temperature", &SampleRow::temperature)
      .def_rw("top_p", &SampleRow::top_p)
      .def_rw("min_p", &SampleRow::min_p)
      .def_rw("repetition", &SampleRow::repetition)
      .def_rw("frequency", &SampleRow::frequency)
      .def_rw("presence", &SampleRow::presence)
      .def("set_stop", [](SampleRow& r, const Ids& a) { r.stop_ids = ids(a); })
      .def("set_allowed", [](SampleRow& r, const Ids& a) { r.allowed_ids = ids(a), r.has_allowed = 1; })
      .def("set_extra", [](SampleRow& r, const Ids& a) { r.extra_ids = ids(a); })
      .def("set_bias",
           [](SampleRow& r, const Ids& a, const Floats& v) {
             r.bias_ids = ids(a);
             r.bias_values.assign(v.data(), v.data() + v.size());
           })
      .def("set_counts", [](SampleRow& r, const Ids& a, const Ids& n) { r.count_ids = ids(a), r.count_out = ids(n); });
  nb::class_<SamplerState>(m, "SamplerState")
      .def(
          "__init__",
          [](SamplerState* self, int max_rows, int vocab, int max_logit_rows, Address relay, Address tokens, Address status) {
            new (self) SamplerState(max_rows, vocab, max_logit_rows, at<int32_t>(relay), at<int32_t>(tokens), at<int32_t>(status));
          },
          "max_rows"_a, "vocab"_a, "max_logit_rows"_a, "relay"_a, "tokens"_a, "status"_a)
      .def("init_row", [](SamplerState& s, int pool_row, const SampleRow& row) { s.init_row(pool_row, row); })
      .def("begin", [](SamplerState& s, const Ids& pool_rows) { s.begin(pool_rows.data(), static_cast<int>(pool_rows.size())); })
      .def("outputs", &SamplerState::outputs)
      .def("logprobs", [](const SamplerState& s, int r) -> nb::object {
        const rootlet::SampleTask& t = s.task(r);
        if (t.top_n < 0) return nb::none();
        const std::vector<int32_t> top(t.top_ids, t.top_ids + t.num_top);
        const std::vector<double> values(t.top_logprobs, t.top_logprobs + t.num_top);
        return nb::cast(std::make_tuple(t.logprob, top, values));
      });
}

void bind_sample(nb::module_& m) {
  m.def(
      "sample",
      [](Tape* tape, SamplerState& state, Address logits, int64_t stride) {
        static OpRef op("sample");
        submit(tape, op, state.args(at<float>(logits), stride));
      },
      "tape"_a.none(), "state"_a, "logits"_a, "stride"_a);
  m.def(
      "raw_logprobs",
      [](Address logits, int64_t stride, int rows, int vocab, int top_n, Address targets, Address status, Address logprob, Address top_ids,
         Address top_logprobs) {
        static OpRef op("raw_logprobs");
        submit(nullptr, op, rootlet::LogprobArgs{at<float>(logits), stride, rows, vocab, top_n, at<int32_t>(targets), at<int32_t>(status),
                                                 at<double>(logprob), at<int32_t>(top_ids), at<double>(top_logprobs)});
      },
      "logits"_a, "stride"_a, "rows"_a, "vocab"_a, "top_n"_a, "targets"_a, "status"_a, "logprob"_a, "top_ids"_a, "top_logprobs"_a);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // an engine that is open when the interpreter ends holds its weights: its threads use them
  bind_tape(m);
  bind_team(m);
  bind_calibrate(m);
  bind_elementwise(m);
  bind_linear(m);
  bind_attention(m);
  bind_sampler_state(m);
  bind_sample(m);
}
