// One kernel source file is compiled once for each instruction set, in namespace rootlet::ROOTLET_ISA (kernels.cmake defines it), and registers its
// ops by name. A new instruction set is a simd_X.h (and, where the portable loop is not enough, a gemm_q_X.h), its options in kernels.cmake and a line
// in dispatch.cpp.
//
//     namespace rootlet::ROOTLET_ISA { namespace {
//     void rms_norm(const void* p, Worker& w) { auto& a = *static_cast<const RmsNormArgs*>(p); ... }
//     ROOTLET_OP(rms_norm);
//     }}
// Everything in such a file stays in an unnamed namespace or is always_inline: two instruction sets must never share an inline function.
#pragma once
#include "rootlet/tensor_args.h"

namespace rootlet {

void register_op(const char* isa, const char* name, OpFn fn);

// Chooses the instruction set: "auto", "scalar", "avx2", ... Throws std::invalid_argument when this machine or build lacks it.
void force_isa(const char* name);
const char* current_isa();
// All built sets that this machine can run, slowest first, comma-separated.
const char* usable_isas();

// A named op, resolved for the current instruction set on use.
class OpRef {
 public:
  explicit constexpr OpRef(const char* name) : name_(name) {}
  const char* name() const { return name_; }
  OpFn fn();

 private:
  const char* name_;
  OpFn fn_ = nullptr;
  int version_ = 0;
};

}  // namespace rootlet

#define ROOTLET_STR2(x) #x
#define ROOTLET_STR(x) ROOTLET_STR2(x)
#define ROOTLET_OP(name) ROOTLET_OP_AS(#name, name, name)
#define ROOTLET_OP_AS(text, fn, unique) \
  [[maybe_unused]] const bool registered_##unique = (::rootlet::register_op(ROOTLET_STR(ROOTLET_ISA), text, fn), true)
