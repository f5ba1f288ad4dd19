// Argument blocks of embedding, norms, rope, activation and gather. An `x_stride` is the distance between rows of an input, in elements, so slices
// of a fused projection need no copy; outputs are dense. Where an op has `q` and `scales`, it can leave its result in int8 blocks of 32 as well (null: it
// does not), and then `out` may be null: nobody reads the floats (fuse.h).
#pragma once
#include "rootlet/tensor_args.h"

namespace rootlet {

struct EmbeddingArgs {
  Count rows;
  WeightKind kind;
  int32_t vocab, k;
  const int32_t* ids;  // an id outside [0, vocab) gives a row of NaN
  const uint8_t* table;
  float* out;
};

struct NormArgs {
  Count rows;
  int32_t heads, n;  // each row holds `heads` vectors of n; each is normalised on its own (rms_norm: heads = 1)
  const float* x;
  ptrdiff_t x_stride;
  const float* weight;  // [n]
  float eps;
  float* out;        // [rows, heads * n]
  int8_t* q;         // [rows, n], heads = 1 only
  int8_t* low;       // [rows, n]: the second plane of blocks that stand out (quantize.h), or null
  ActScale* scales;  // [rows, n / 32]
};

struct RopeArgs {
  Count rows;
  int32_t heads, head_dim, rotary_dim, max_len;
  int32_t interleaved;  // 0: pairs (i, i + rotary_dim / 2); 1: pairs (2i, 2i + 1)
  const float* x;
  ptrdiff_t x_stride;
  const int32_t* positions;  // a position outside [0, max_len) gives a row of NaN
  const float* cos_sin;      // [max_len, rotary_dim]: cos, then sin
  float* out;
};

struct SiluArgs {
  Count rows;
  int32_t n;  // F: x is [rows, 2F], gate first
  const float* x;
  ptrdiff_t x_stride;
  float* out;
  int8_t* q;
  ActScale* scales;
};

struct GatherArgs {
  Count rows;  // of the output
  int32_t n, num_source_rows;
  const float* x;
  ptrdiff_t x_stride;
  const int32_t* index;  // outside [0, num_source_rows) gives a row of NaN
  float* out;
};

}  // namespace rootlet
