"""The torch reference of block-quantised values: bytes of a GGUF block -> float32, and what `ops.linear` does to activations before such a block.

Layouts (little endian; j = 0..15; low nibbles hold values 0..15 of the block, high nibbles 16..31):
    q4_0  f16 d | 16 x u8                 v = d * (q - 8)            q5_0  f16 d | u32 high bits | 16 x u8            v = d * (q - 16)
    q4_1  f16 d | f16 m | 16 x u8         v = d * q + m              q5_1  f16 d | f16 m | u32 high bits | 16 x u8    v = d * q + m
    q8_0  f16 d | 32 x i8                 v = d * q
What becomes of the other types is decided in `quant/gguf_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 32
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}


def is_block(kind: str) -> bool:
    """True for the block types that every kernel table takes as they are."""
    return kind in BLOCK_BYTES


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block as float32: [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., 16] -> [..., 32], low nibbles first."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """The 32 high bits of a q5 block, one a value, as 0 or 16: uint8 [..., 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[..., at : at + 4].unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2) << 4


def _q4_0(b: Tensor) -> Tensor:
    return (_nibbles(b[..., 2:]).to(torch.float32) - 8.0) * _half(b, 0)


def _q4_1(b: Tensor) -> Tensor:
    return _nibbles(b[..., 4:]).to(torch.float32) * _half(b, 0) + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return ((_nibbles(b[..., 6:]) | _fifth_bits(b, 2)).to(torch.float32) - 16.0) * _half(b, 0)


def _q5_1(b: Tensor) -> Tensor:
    return (_nibbles(b[..., 8:]) | _fifth_bits(b, 4)).to(torch.float32) * _half(b, 0) + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return b[..., 2:].contiguous().view(torch.int8).to(torch.float32) * _half(b, 0)


_DEQUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {"q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0}


def dequantize_rows(kind: str, data: Tensor) -> Tensor:
    """uint8 [..., row_bytes] -> float32 [..., K]."""
    size = BLOCK_BYTES[kind]
    blocks = data.reshape(*data.shape[:-1], -1, size)
    return _DEQUANTIZE[kind](blocks).flatten(-2)


STANDS_OUT = 2.5
"""A block gets a second plane when its largest magnitude is above this many times the mean of its row's blocks."""

LOW_STEPS = 128.0
"""Steps of the second plane in one step of the first."""


def quantize_activations(x: Tensor, *, normed: bool = False) -> tuple[Tensor, Tensor]:
    """float32 [T, K] -> (q float32 [T, K/32, 32], d float32 [T, K/32, 1]): what `ops.linear` does to x before a block-typed weight. x is about q * d;
    q holds integers, in blocks with a second plane multiples of 1 / 128."""
    t, k = x.shape
    blocks = x.reshape(t, k // BLOCK, BLOCK)
    top = blocks.abs().amax(dim=-1, keepdim=True)
    tiny = top < 1e-30  # 127 / top would overflow: the block counts as zeros
    inverse = torch.where(tiny, torch.zeros(()), 127.0 / top)
    exact = blocks * inverse
    q = exact.round()
    if normed:
        limit = sum(top.unbind(1), torch.zeros(t, 1)) * STANDS_OUT / (k // BLOCK)  # added in ascending order, as the kernels do
        stands_out = top > limit.unsqueeze(1)
        q = torch.where(stands_out, q + ((exact - q) * LOW_STEPS).round() / LOW_STEPS, q)
    return q, torch.where(tiny, torch.zeros(()), top / 127.0)
