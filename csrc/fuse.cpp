#include "rootlet/fuse.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "rootlet/dispatch.h"

namespace rootlet {
namespace {

constexpr const char* kGemmNames[] = {"gemm_f32", "gemm_f16", "gemm_bf16", "gemm_q4_0", "gemm_q4_1", "gemm_q5_0", "gemm_q5_1", "gemm_q8_0"};

OpRef& gated_op(int kind) {
  static OpRef ops[] = {OpRef("gated_q4_0"), OpRef("gated_q4_1"), OpRef("gated_q5_0"), OpRef("gated_q5_1"), OpRef("gated_q8_0")};
  return ops[kind - static_cast<int>(WeightKind::kQ4_0)];
}

bool same(const Count& a, const Count& b) { return a.live == b.live && a.fixed == b.fixed; }

struct Span {
  const void* begin;
  size_t bytes;
};

bool overlap(Span a, Span b) {
  const auto x = reinterpret_cast<uintptr_t>(a.begin), y = reinterpret_cast<uintptr_t>(b.begin);
  return a.begin && b.begin && x < y + b.bytes && y < x + a.bytes;
}

template <class T>
Span rows_of(const T* x, const Count& rows, ptrdiff_t stride) {
  return {x, sizeof(T) * static_cast<size_t>(rows.fixed) * static_cast<size_t>(stride)};
}

// Writing an op's int8 result while another worker still reads its input.
bool clobbers(const QuantizeArgs& a, Span read) {
  return overlap(rows_of(a.q, a.rows, a.k), read) || overlap(rows_of(a.low, a.rows, a.k), read) ||
         overlap(rows_of(a.scales, a.rows, a.k / kQuantBlock), read);
}

// `a` quantises, in place and in full, what op `n` wrote to `out`.
template <class Args>
bool result_of(const QuantizeArgs& a, const Args& n, int width) {
  return n.out == a.x && a.k == width && a.x_stride == width && !n.q;
}

// Hands q and scales to the last op, and leaves its floats out unless they share memory with them (then they were dead already).
template <class Args>
void leave_blocks(Tape& tape, const QuantizeArgs& a, Args& n, int8_t* Args::*q, std::vector<uintptr_t>& elided) {
  n.*q = a.q;
  n.scales = a.scales;
  if (!clobbers(a, rows_of(a.x, a.rows, a.x_stride))) {
    const auto address = reinterpret_cast<uintptr_t>(n.out);
    tape.elide(address, tape.size() - 1, offsetof(Args, out));
    elided.push_back(address);
  }
  n.out = nullptr;
}

// `written` is something that a linear, or the norm before it, reads.
bool reads(const LinearArgs& l, Span written) {
  return overlap(rows_of(l.norm.x, l.rows, l.norm.x_stride), written) || overlap(rows_of(l.q, l.rows, l.k), written) ||
         overlap(rows_of(l.low, l.rows, l.k), written) || overlap(rows_of(l.scales, l.rows, l.k / kQuantBlock), written);
}

bool fuse_gated(Tape& tape, const QuantizeArgs& a, const SiluArgs& silu, std::vector<uintptr_t>& elided) {
  for (int kind = static_cast<int>(WeightKind::kQ4_0); kind <= static_cast<int>(WeightKind::kQ8_0); ++kind) {
    const auto* linear = tape.recent<LinearArgs>(kGemmNames[kind], 1);
    if (!linear) continue;
    const bool feeds = linear->out == silu.x && silu.x_stride == linear->n && linear->n == 2 * silu.n && same(linear->rows, silu.rows);
    const Span written[] = {rows_of(a.q, a.rows, a.k), rows_of(a.scales, a.rows, a.k / kQuantBlock), rows_of(silu.out, silu.rows, silu.n)};
    const auto is_input = [&](const Span& s) { return reads(*linear, s); };
    if (!feeds || linear->residual || std::any_of(std::begin(written), std::end(written), is_input)) return false;
    GatedArgs fused{*linear, nullptr, a.q, a.scales};
    const size_t at = tape.size() - 2;
    tape.drop_last();
    tape.drop_last();
    tape.move_elided(at, offsetof(GatedArgs, linear));
    const float* floats[] = {fused.linear.out, silu.out};
    const size_t offsets[] = {offsetof(GatedArgs, linear) + offsetof(LinearArgs, out), offsetof(GatedArgs, out)};
    const size_t widths[] = {static_cast<size_t>(fused.linear.n), static_cast<size_t>(silu.n)};
    for (int i = 0; i < 2; ++i) {
      if (clobbers(a, rows_of(floats[i], a.rows, static_cast<ptrdiff_t>(widths[i])))) continue;
      tape.elide(reinterpret_cast<uintptr_t>(floats[i]), at, offsets[i]);
      elided.push_back(reinterpret_cast<uintptr_t>(floats[i]));
    }
    fused.linear.out = nullptr;
    OpRef& op = gated_op(kind);
    tape.append(op.name(), op.fn(), &fused, sizeof fused);
    return true;
  }
  return false;
}

}  // namespace

bool fuse_quantize(Tape& tape, const QuantizeArgs& a, std::vector<uintptr_t>& elided) {
  if (auto* n = tape.recent<NormArgs>("rms_norm")) {
    if (n->heads != 1 || !result_of(a, *n, n->n) || !same(a.rows, n->rows) || clobbers(a, rows_of(n->x, n->rows, n->x_stride))) return false;
    n->low = a.low;
    leave_blocks(tape, a, *n, &NormArgs::q, elided);
    return true;
  }
  if (a.low) return false;  // only a norm has the whole row at hand
  if (auto* n = tape.recent<SiluArgs>("silu_and_mul")) {
    if (!result_of(a, *n, n->n) || !same(a.rows, n->rows)) return false;
    if (fuse_gated(tape, a, *n, elided)) return true;
    if (clobbers(a, rows_of(n->x, n->rows, n->x_stride))) return false;
    leave_blocks(tape, a, *n, &SiluArgs::q, elided);
    return true;
  }
  if (auto* n = tape.recent<AttentionArgs>("attention")) {
    const int width = n->heads * n->dim;
    const bool fits = n->out == a.x && a.k == width && a.x_stride == width && !n->q8 && n->dim % kQuantBlock == 0;
    if (!fits || clobbers(a, rows_of(n->q, a.rows, n->q_stride))) return false;
    leave_blocks(tape, a, *n, &AttentionArgs::q8, elided);
    return true;
  }
  return false;
}

void fuse_norm(Tape& tape, LinearArgs& a) {
  auto* n = tape.recent<NormArgs>("rms_norm");
  if (!n || !n->q || n->q != a.q || n->low != a.low || n->n != a.k || !same(n->rows, a.rows)) return;
  const Span read = rows_of(n->x, n->rows, n->x_stride);
  if (overlap(rows_of(a.out, a.rows, a.n), read)) return;
  a.norm = *n;
  const size_t at = tape.size() - 1;
  tape.drop_last();
  tape.move_elided(at, offsetof(LinearArgs, norm));
}

bool fuse_store_kv(Tape& tape, const StoreKvArgs& a) {
  const auto* n = tape.recent<RopeArgs>("rope");
  if (!n || n->head_dim != a.dim || n->heads <= a.kv_heads || a.k_stride != static_cast<int64_t>(n->heads) * a.dim || !same(n->rows, a.tokens)) return false;
  if (a.k != n->out + static_cast<ptrdiff_t>(n->heads - a.kv_heads) * a.dim) return false;
  if (overlap(rows_of(n->out, n->rows, static_cast<ptrdiff_t>(n->heads) * a.dim), rows_of(a.v, a.tokens, a.v_stride))) return false;
  const RopeStoreArgs fused{*n, a};
  static OpRef op("rope_store");
  tape.drop_last();
  tape.append(op.name(), op.fn(), &fused, sizeof fused);
  return true;
}

}  // namespace rootlet
