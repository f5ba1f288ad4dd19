#include "rootlet/packed.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "rootlet/dispatch.h"
#include "rootlet/threads.h"

namespace rootlet {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

OpRef& pack_op(WeightKind kind) {
  static OpRef ops[] = {OpRef("pack_float"), OpRef("pack_float"), OpRef("pack_float"), OpRef("pack_q4_0"),
                        OpRef("pack_q4_1"),  OpRef("pack_q5_0"),  OpRef("pack_q5_1"),  OpRef("pack_q8_0")};
  return ops[static_cast<int>(kind)];
}

}  // namespace

PackedWeight::PackedWeight(WeightKind kind, int n, int k, const uint8_t* source) : kind_(kind), n_(n), k_(k), bytes_(0), data_(nullptr) {
  if (n < 1 || k < 1 || (is_block_kind(kind) && k % kQuantBlock != 0)) {
    throw std::invalid_argument("a weight of [" + std::to_string(n) + ", " + std::to_string(k) + "] cannot be packed: K must be a multiple of 32");
  }
  bytes_ = static_cast<size_t>((n + kGroupColumns - 1) / kGroupColumns) * group_bytes(kind, k);
  const size_t align = bytes_ >= kHugePage ? kHugePage : 64;
  data_ = static_cast<uint8_t*>(aligned_alloc(align, (bytes_ + align - 1) / align * align));
  if (!data_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (align == kHugePage) madvise(data_, bytes_, MADV_HUGEPAGE);  // fewer TLB misses on a stream; advice only
#endif
  const PackArgs args{kind, n, k, source, data_};
  const Op op{pack_op(kind).fn(), &args};
  run_ops(&op, 1, nullptr);
}

PackedWeight::~PackedWeight() { free(data_); }

}  // namespace rootlet
