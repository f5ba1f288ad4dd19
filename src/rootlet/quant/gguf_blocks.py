"""What weights become that no kernel takes as they are.

A block is 32 (legacy types) or 256 (K and IQ types) consecutive values of one row. Block types without a kernel are dequantised once at load (by the
`gguf` library) and requantised to q8_0, which the loader reports. The bytes of a block are explained in `kernels/reference_blocks.py`; files are
read by `formats`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootlet.kernels.reference_blocks import BLOCK, BLOCK_BYTES

DENSE_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def quantize_q8_0(values: Tensor) -> Tensor:
    """float32 [N, K], K % 32 == 0 -> uint8 [N, K/32*34]: d = amax / 127 rounded to float16, q = round(v / d), ties to even."""
    n, k = values.shape
    assert k % BLOCK == 0, f"q8_0 needs a multiple of {BLOCK} columns, got {k}"
    blocks = values.reshape(n, k // BLOCK, BLOCK)
    d = (blocks.abs().amax(dim=-1, keepdim=True) / 127.0).to(torch.float16)
    inverse = torch.where(d > 0, 1.0 / d.to(torch.float32), torch.zeros(()))
    q = (blocks * inverse).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((d.view(torch.uint8), q.view(torch.uint8)), dim=-1).reshape(n, -1)


def common_kind(kinds: list[str]) -> str:
    """The kind that matrices of `kinds` (types with a kernel, or dense) share once their rows are joined into one matrix."""
    if len(set(kinds)) == 1:
        return kinds[0]
    return "q8_0" if all(k in BLOCK_BYTES for k in kinds) else "f32"
