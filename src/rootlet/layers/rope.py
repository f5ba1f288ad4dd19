"""Rotary position embedding: the cos/sin table of each kind, computed once in float64 and kept in float32.

    angle(p, i) = p * f_i,   f_i = theta^(-2i / rotary_dim)        default
    linear      f_i / factor
    llama3      long wavelengths are divided by factor, short ones kept, between them a straight blend
    yarn        as llama3, with the blend over the dimension index; cos and sin scaled by the attention factor
    factors     f_i / factors_i first, given one by one by the file (GGUF rope_freqs); then the kind
Sources: RoFormer; Llama 3 and YaRN papers; names of the fields as in Hugging Face configs. Does not rotate: that is `ops.rope`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rootlet.config.model import RopeConfig
from rootlet.core.errors import BadModelFile
from rootlet.kernels import ops

TABLE_ROWS = 1 << 15


def _base_frequencies(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    return torch.pow(torch.tensor(rope.theta, dtype=torch.float64), -exponents)


def _llama3(rope: RopeConfig, freqs: Tensor) -> Tensor:
    wavelen = 2.0 * math.pi / freqs
    turns = rope.original_max_len / wavelen
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return keep * freqs + (1.0 - keep) * freqs / rope.factor


def _yarn(rope: RopeConfig, freqs: Tensor) -> Tensor:
    def dim_of(turns: float) -> float:
        """The (fractional) dimension pair that makes `turns` turns over the original context, doubled."""
        return rope.rotary_dim * math.log(rope.original_max_len / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), rope.rotary_dim - 1)
    span = max(high - low, 0.001)
    stretched = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float64) - low) / span).clamp(0.0, 1.0)
    return stretched * freqs / rope.factor + (1.0 - stretched) * freqs


def _frequencies(rope: RopeConfig) -> Tensor:
    freqs = _base_frequencies(rope)
    if rope.factors:
        freqs = freqs / torch.tensor(rope.factors, dtype=torch.float64)
    if rope.kind == "default":
        return freqs
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, freqs)
    if rope.kind == "yarn":
        return _yarn(rope, freqs)
    raise BadModelFile(f"rope kind {rope.kind!r} is not supported (known: default, linear, llama3, yarn)")


def _magnitude(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.kind == "yarn" and rope.factor > 1.0 else 1.0


def cos_sin_table(rope: RopeConfig, max_len: int) -> Tensor:
    """float32 [max_len, rotary_dim]: cosines of the rotary_dim/2 frequencies, then sines. Raises `BadModelFile` on an unknown kind."""
    freqs, magnitude = _frequencies(rope), _magnitude(rope)
    table = torch.empty(max_len, 2 * len(freqs), dtype=torch.float32)
    for start in range(0, max_len, TABLE_ROWS):  # float64 for a block of positions only: a long context has gigabytes of them
        rows = table[start : start + TABLE_ROWS]
        angles = torch.outer(torch.arange(start, start + len(rows), dtype=torch.float64), freqs)
        rows.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude)
    return table


class RotaryEmbedding:
    """One table for all layers of a model. A layer without rope (NoPE) simply has none."""

    __slots__ = ("cos_sin", "head_dim", "interleaved")

    def __init__(self, rope: RopeConfig, head_dim: int, max_len: int) -> None:
        self.cos_sin = cos_sin_table(rope, max_len)
        self.head_dim = head_dim
        self.interleaved = rope.interleaved

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads * D], positions int32 [T] -> rotated x."""
        return ops.table().rope(x, positions, self.cos_sin, self.head_dim, self.interleaved)
