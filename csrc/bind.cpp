// The one file that knows Python. Every op is a function (tape or None, ...): with a tape it is recorded, without one it runs at once. Tensors arrive
// as addresses; shapes, dtypes and strides were checked by kernels/cpu/table.py, which keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "rootlet/dispatch.h"
#include "rootlet/elementwise.h"
#include "rootlet/graph.h"
#include "rootlet/threads.h"

namespace nb = nanobind;
using namespace nb::literals;
using rootlet::Count;
using rootlet::OpRef;
using rootlet::RowSpace;
using rootlet::Tape;

namespace {

using Address = uintptr_t;

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
          [](Tape& t, int tokens, int rows, int logit_rows, int work, bool profile) {
            rootlet::StepHeader h{tokens, rows, logit_rows, work, {}};
            t.replay(h, profile);
          },
          "num_tokens"_a, "num_rows"_a, "num_logit_rows"_a, "num_work"_a, "profile"_a = false, nb::call_guard<nb::gil_scoped_release>())
      .def("max_rows", [](const Tape& t, int space) { return t.max_rows(static_cast<RowSpace>(space)); })
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

void bind_elementwise(nb::module_& m) {
  m.def(
      "add",
      [](Tape* tape, Address x, int64_t x_stride, Address y, int64_t y_stride, Address out, int rows, int space, int n) {
        static OpRef op("add");
        submit(tape, op, rootlet::AddArgs{count_of(tape, rows, space), n, at<float>(x), x_stride, at<float>(y), y_stride, at<float>(out)});
      },
      "tape"_a.none(), "x"_a, "x_stride"_a, "y"_a, "y_stride"_a, "out"_a, "rows"_a, "space"_a, "n"_a);
}

}  // namespace

void bind_ops_b(nb::module_& m);  // attention, sampling

NB_MODULE(_native, m) {
  bind_ops_b(m);
  bind_tape(m);
  bind_team(m);
  bind_elementwise(m);
}
