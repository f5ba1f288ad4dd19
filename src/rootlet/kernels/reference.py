"""The torch reference of every op in `kernels/ops.py`: the definition up to rounding, for every page size and weight kind. Slow, and says so.

Rows keep their bits in any batch here too: torch's matmul picks another kernel for another number of rows, so `linear` always multiplies tiles of
exactly `TILE` rows (the last one padded with zeros). Attention and sampling references live in their own files and are called from here.
Weights of block types are dequantised once, in `prepare_linear`, to float32 (`Weight.packed`): memory for simplicity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rootlet.kernels import reference_attention, reference_sampling
from rootlet.kernels.ops import AttentionMeta, KVLayer, Weight
from rootlet.kernels.reference_blocks import dequantize_rows, is_block, quantize_activations

TILE = 16


def _row_tiled_matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K] @ w.T for w [N, K], with the same bits for a row whatever T is."""
    rows = x.shape[0]
    padded = -(-rows // TILE) * TILE
    if padded != rows:
        x = torch.cat((x, x.new_zeros(padded - rows, x.shape[1])))
    out = x.new_empty(padded, w.shape[0])
    for start in range(0, padded, TILE):
        torch.mm(x[start : start + TILE], w.t(), out=out[start : start + TILE])
    return out[:rows]


class ReferenceTable:
    """Satisfies `KernelTable`. Stateless."""

    name = "reference"

    def prepare_linear(self, w: Weight) -> None:
        """`packed` = the matrix in float32."""
        if w.packed is None:
            assert w.data is not None
            w.packed = dequantize_rows(w.kind, w.data) if is_block(w.kind) else w.data.to(torch.float32)

    def embedding(self, ids: Tensor, w: Weight) -> Tensor:
        assert w.data is not None, "an embedding table keeps its data"
        rows = w.data[ids.to(torch.int64)]
        return dequantize_rows(w.kind, rows) if is_block(w.kind) else rows.to(torch.float32)

    def linear(self, x: Tensor, w: Weight, bias: Tensor | None = None, residual: Tensor | None = None, *, normed: bool = False) -> Tensor:
        self.prepare_linear(w)
        if is_block(w.kind):
            q, d = quantize_activations(x, normed=normed)
            x = (q * d).flatten(1)
        out = _row_tiled_matmul(x.contiguous(), w.packed)
        if bias is not None:
            out = out + bias
        return out if residual is None else out + residual

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        heads = x.reshape(x.shape[0], -1, weight.shape[0])
        return self.rms_norm(heads, weight, eps).flatten(1)

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
        """(a, b) -> (a cos - b sin, b cos + a sin) for each pair of the rotary part; the rest passes through."""
        half = cos_sin.shape[1] // 2
        heads = x.reshape(x.shape[0], -1, head_dim)
        rotation = cos_sin[positions.to(torch.int64)].unsqueeze(1)
        cos, sin = rotation[..., :half], rotation[..., half:]
        out = heads.clone()
        rotary = out[..., : 2 * half]
        if interleaved:
            a, b = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
            rotary[..., 0::2], rotary[..., 1::2] = a * cos - b * sin, b * cos + a * sin
        else:
            a, b = heads[..., :half], heads[..., half : 2 * half]
            rotary[..., :half], rotary[..., half:] = a * cos - b * sin, b * cos + a * sin
        return out.flatten(1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows.to(torch.int64)]

    def store_kv(self, k: Tensor, v: Tensor, layer: KVLayer, out_cache_loc: Tensor) -> None:
        reference_attention.store_kv(k, v, layer, out_cache_loc)

    def attention(self, q: Tensor, layer: KVLayer, meta: AttentionMeta, scale: float, window: int | None = None) -> Tensor:
        return reference_attention.attention(q, layer, meta, scale, window)

    def sample(self, logits: Tensor, state: Any) -> None:
        reference_sampling.sample(logits, state)
