// A weight matrix in the kernels' own layout, made once at load on the whole team. Weights lie one behind the other in chunks of huge pages: a step reads
// all of them once, and with pages of 4 KB the page walks cost 8 to 15 % of its linears. A chunk lives as long as any weight in it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "rootlet/linear.h"

namespace rootlet {

class PackedWeight {
 public:
  // `source` [n, row_bytes(kind, k)] is only read here. Throws std::invalid_argument on shapes that the kernels cannot hold, std::bad_alloc.
  PackedWeight(WeightKind kind, int n, int k, const uint8_t* source);
  PackedWeight(const PackedWeight&) = delete;
  PackedWeight& operator=(const PackedWeight&) = delete;

  WeightKind kind() const { return kind_; }
  int n() const { return n_; }
  int k() const { return k_; }
  const uint8_t* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  WeightKind kind_;
  int n_, k_;
  size_t bytes_;
  std::shared_ptr<uint8_t> data_;
};

}  // namespace rootlet
