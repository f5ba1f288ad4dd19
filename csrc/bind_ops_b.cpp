// Python's view of attention and sampling: the same rules as bind.cpp (a tape or None first, tensors as addresses that Python checked).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "rootlet/attention.h"
#include "rootlet/dispatch.h"
#include "rootlet/fuse.h"
#include "rootlet/graph.h"
#include "rootlet/sample.h"
#include "rootlet/threads.h"

namespace nb = nanobind;
using namespace nb::literals;
using rootlet::Count;
using rootlet::OpRef;
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

std::vector<int32_t> ids(const Ids& a) { return {a.data(), a.data() + a.size()}; }

void bind_attention(nb::module_& m) {
  m.def(
      "store_kv",
      [](Tape* tape, Address k, int64_t k_stride, Address v, int64_t v_stride, Address k_pages, Address v_pages, Address k_scales, Address v_scales,
         Address slots, int rows, int space, int kv_heads, int dim, int page_size, int kind) {
        static OpRef op("store_kv");
        const Count tokens = tape ? tape->count(static_cast<RowSpace>(space), rows) : Count{nullptr, rows};
        const rootlet::StoreKvArgs a{at<float>(k), at<float>(v), k_stride, v_stride, at<void>(k_pages), at<void>(v_pages), at<float>(k_scales),
                                     at<float>(v_scales), at<int32_t>(slots), tokens, kv_heads, dim, page_size, static_cast<rootlet::KvKind>(kind)};
        if (!tape || !rootlet::fuse_store_kv(*tape, a)) submit(tape, op, a);
      },
      "tape"_a.none(), "k"_a, "k_stride"_a, "v"_a, "v_stride"_a, "k_pages"_a, "v_pages"_a, "k_scales"_a, "v_scales"_a, "slots"_a, "rows"_a, "space"_a, "kv_heads"_a, "dim"_a,
      "page_size"_a, "kind"_a);
  m.def(
      "attention",
      [](Tape* tape, Address q, int64_t q_stride, Address out, Address k_pages, Address v_pages, Address k_scales, Address v_scales, Address page_table, int64_t page_stride, Address row_ids,
         Address qo_indptr, Address prefix_lens, Address order, Address work, Address num_work, Address partials, int64_t num_partials, int heads, int kv_heads, int dim, int page_size, int kind, int window,
         float scale) {
        static OpRef op("attention");
        submit(tape, op,
               rootlet::AttentionArgs{at<float>(q), q_stride, at<float>(out), at<void>(k_pages), at<void>(v_pages), at<float>(k_scales), at<float>(v_scales), at<int32_t>(page_table),
                                      at<int32_t>(row_ids), at<int32_t>(qo_indptr), at<int32_t>(prefix_lens), at<int32_t>(order), at<int32_t>(work), at<int32_t>(num_work),
                                      at<float>(partials), num_partials, page_stride, heads, kv_heads, dim, page_size, static_cast<rootlet::KvKind>(kind), window, scale, nullptr, nullptr});
      },
      "tape"_a.none(), "q"_a, "q_stride"_a, "out"_a, "k_pages"_a, "v_pages"_a, "k_scales"_a, "v_scales"_a, "page_table"_a, "page_stride"_a, "row_ids"_a, "qo_indptr"_a,
      "prefix_lens"_a, "order"_a, "work"_a, "num_work"_a, "partials"_a, "num_partials"_a, "heads"_a, "kv_heads"_a, "dim"_a, "page_size"_a, "kind"_a, "window"_a, "scale"_a);
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

void bind_ops_b(nb::module_& m) {
  bind_attention(m);
  bind_sampler_state(m);
  bind_sample(m);
}
