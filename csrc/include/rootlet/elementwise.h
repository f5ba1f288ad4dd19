// Argument blocks of embedding, norms, rope, activation, add and gather. `x_stride` is the distance between rows of an input, in elements, so slices of
// a fused projection need no copy; outputs are dense.
#pragma once
#include "rootlet/tensor_args.h"

namespace rootlet {

struct AddArgs {
  Count rows;
  int32_t n;
  const float* x;
  ptrdiff_t x_stride;
  const float* y;
  ptrdiff_t y_stride;
  float* out;
};

}  // namespace rootlet
