// Peepholes of the tape: an op that is about to be recorded right behind the one that feeds it is merged into it, so the team meets less often and
// numbers stay in cache. The model's Python knows nothing of it, and no bit changes:
//
//     rms_norm, quantize          -> rms_norm that leaves int8 blocks      attention, quantize -> the same
//     rms_norm(q), gemm           -> gemm that begins with the norm
//     gemm, silu_and_mul, quantize -> gated gemm                           rope, store_kv      -> rope_store
//
// A merged op does not write the floats in between (they are "elided") unless somebody turns out to read them: `Tape::materialise`.
#pragma once
#include <vector>

#include "rootlet/attention.h"
#include "rootlet/graph.h"
#include "rootlet/linear.h"

namespace rootlet {

// Each returns true when `args` went into an op that is on the tape already. Buffers that are written early because of it never overlap what the merged op
// still has to read. `elided` gets the addresses of the floats that are not written.
bool fuse_quantize(Tape& tape, const QuantizeArgs& args, std::vector<uintptr_t>& elided);
bool fuse_store_kv(Tape& tape, const StoreKvArgs& args);
// Takes the norm that feeds `args` off the tape and into `args`, which the caller records next.
void fuse_norm(Tape& tape, LinearArgs& args);

}  // namespace rootlet
