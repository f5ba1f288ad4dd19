#include "rootlet/packed.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "rootlet/dispatch.h"
#include "rootlet/threads.h"

namespace rootlet {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{16} << 20;
constexpr size_t kShare = size_t{64} << 10;  // smaller weights are not worth a huge page

constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

std::shared_ptr<uint8_t> allocate(size_t bytes, size_t align) {
  std::shared_ptr<uint8_t> memory(static_cast<uint8_t*>(aligned_alloc(align, round_up(bytes, align))), free);
  if (!memory) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (align == kHugePage) madvise(memory.get(), round_up(bytes, align), MADV_HUGEPAGE);  // advice only
#endif
  return memory;
}

// Memory of one weight: behind the last one in the newest chunk, or in a new chunk.
class Chunks {
 public:
  std::shared_ptr<uint8_t> place(size_t bytes) {
    if (bytes < kShare) return allocate(bytes, 64);
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<uint8_t> chunk = newest_.lock();
    if (!chunk || size_ - used_ < bytes) {
      size_ = round_up(bytes > kChunk ? bytes : kChunk, kHugePage);
      chunk = allocate(size_, kHugePage);
      newest_ = chunk;
      used_ = 0;
    }
    uint8_t* at = chunk.get() + used_;
    used_ = round_up(used_ + bytes, 64);
    return {chunk, at};
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<uint8_t> newest_;
  size_t size_ = 0, used_ = 0;
};

Chunks& chunks() {
  static auto* c = new Chunks;  // never destroyed: weights may outlive static destructors
  return *c;
}

OpRef& pack_op(WeightKind kind) {
  static OpRef ops[] = {OpRef("pack_float"), OpRef("pack_float"), OpRef("pack_float"), OpRef("pack_q4_0"),
                        OpRef("pack_q4_1"),  OpRef("pack_q5_0"),  OpRef("pack_q5_1"),  OpRef("pack_q8_0")};
  return ops[static_cast<int>(kind)];
}

}  // namespace

PackedWeight::PackedWeight(WeightKind kind, int n, int k, const uint8_t* source) : kind_(kind), n_(n), k_(k), bytes_(0) {
  if (n < 1 || k < 1 || (is_block_kind(kind) && k % kQuantBlock != 0)) {
    throw std::invalid_argument("a weight of [" + std::to_string(n) + ", " + std::to_string(k) + "] cannot be packed: K must be a multiple of 32");
  }
  bytes_ = static_cast<size_t>(num_units(kind, n)) * unit_bytes(kind, k);
  data_ = chunks().place(bytes_);
  const PackArgs args{kind, n, k, source, data_.get()};
  const Op op{pack_op(kind).fn(), &args};
  run_ops(&op, 1, nullptr);
}

}  // namespace rootlet
