// Argument block of the calibration loops.
#pragma once
#include "rootlet/tensor_args.h"

namespace rootlet {

struct CalibrateArgs {
  int64_t rounds;       // calibrate_multiply
  const float* floats;  // calibrate_read
  int32_t num_floats;
  int64_t* done;  // [threads]: multiply-adds, or bytes read
};

}  // namespace rootlet
