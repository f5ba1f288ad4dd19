"""Block types of GGUF weights: their sizes, which ones have a kernel, and what becomes of the others.

A block is 32 (legacy types) or 256 (K and IQ types) consecutive values of one row. Types with `kernel` True stay as they are in memory; every
other type is dequantised once at load and requantised to `fallback`, which the loader reports. The bytes of a block are explained in
`kernels/reference_blocks.py`; files are read by `formats`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rootlet.kernels.reference_blocks import BLOCK, BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class BlockType:
    """`fallback`: kind that a type without a kernel is converted to at load ("" when it has one)."""

    name: str
    block_len: int
    block_bytes: int
    kernel: bool
    fallback: str = ""

    def row_bytes(self, k: int) -> int:
        assert k % self.block_len == 0, f"{k} values are no whole number of {self.name} blocks"
        return k // self.block_len * self.block_bytes


def _k_types() -> list[BlockType]:
    sizes = {"q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210}
    sizes |= {"iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82, "iq3_xxs": 98, "iq3_s": 110, "iq1_s": 50, "iq1_m": 56, "iq4_xs": 136}
    sizes |= {"tq1_0": 54, "tq2_0": 66}
    return [BlockType(name, 256, size, kernel=False, fallback="q8_0") for name, size in sizes.items()]


BLOCK_TYPES: dict[str, BlockType] = {
    t.name: t
    for t in (
        *(BlockType(name, BLOCK, size, kernel=True) for name, size in BLOCK_BYTES.items()),
        BlockType("iq4_nl", BLOCK, 18, kernel=False, fallback="q8_0"),
        BlockType("mxfp4", BLOCK, 17, kernel=False, fallback="q8_0"),
        *_k_types(),
    )
}

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
