"""The contracts of all kernels: the only documentation of shapes. Plain functions; the table behind them is bound once from the device.

Legend: T tokens of the step, N output features, K input features, H / Hkv query / KV heads, D head dim, V vocab, P page size, R logit rows.
Activations are float32, row-major, contiguous [T, features]. Every op reduces each output row in one fixed order that does not depend on T, on
the row's position or on its neighbours (promise 1), so a row's bits are the same alone and in any batch.

Three implementations, equal by test: `reference` (torch, the definition up to rounding), native scalar (the definition to the bit), native
SIMD. Under graph capture (device.Graph) a native op records itself on the tape instead of running: outputs come from the capture arena, row
counts are read from the step header at replay, so one tape serves every T up to the captured maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class Weight:
    """A matrix [N, K] (or an embedding table [V, K]) as its file stores it.

    `kind`: "f32" | "f16" | "bf16" (data: that torch dtype, [N, K]) or a GGUF block type "q4_0" | "q4_1" | "q5_0" | "q5_1" | "q8_0" (data: uint8,
    [N, row_bytes], row-major GGUF blocks, may be a view of the mmapped file). `packed`: the native library's repacked handle, made by
    `ops.prepare_linear`; once it exists `data` may be dropped (set to None) unless the matrix also serves as embedding.
    """

    kind: str
    n: int
    k: int
    data: Tensor | None
    packed: Any = None


@dataclass(slots=True)
class KVLayer:
    """One layer's paged KV, float16, float32 or int8. Native layout ("blocked", P % 16 == 0): k [pages, Hkv, P/16, D, 16] (16 keys contiguous for
    each dimension), v [pages, Hkv, P, D]. Reference layout ("plain", any P): k, v [pages, Hkv, P, D]. Page 0 is the padding sink.
    int8: value = scale * q, one float32 scale a token and kv head, `k_scales` and `v_scales` [pages, Hkv, P] (else None)."""

    k: Tensor
    v: Tensor
    page_size: int
    layout: str
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


@dataclass(slots=True)
class AttentionMeta:
    """What one step's attention reads; int32 tensors that stay at the same address from step to step (static buffers, filled in place).

    page_table [rows, max_pages] (the executor's resident table), row_ids [B], qo_indptr [B+1], prefix_lens [B],
    work [W, 8] work items in the order they should start: (q_begin, q_count, kv_head, batch_index, kv_begin, kv_len, shared, members);
    `num_work` [1]. An item's rows attend to keys [kv_begin, kv_len) of their request, causally: the row at position p sees keys <= p.
    shared > 0: `q_count` requests of one query token each, order[members...] their batch indices, whose first `shared` keys lie in the same pages.
    Definition: keys are cut on a grid of 128 positions; each cut gives (max, sum, acc); cuts are merged in ascending order.
    """

    page_table: Tensor
    row_ids: Tensor
    qo_indptr: Tensor
    prefix_lens: Tensor
    order: Tensor
    work: Tensor
    num_work: Tensor
    page_size: int


class KernelTable(Protocol):
    """One implementation of every op. Native and reference tables both satisfy it."""

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def prepare_linear(self, w: Weight) -> None:
        """Repack `w` for `linear` (native: 16-column groups, cpu-kernels.md 2). Idempotent. Called once at load."""
        ...

    def embedding(self, ids: Tensor, w: Weight) -> Tensor:
        """ids int32 [T] -> float32 [T, K]; quantised tables are dequantised a row at a time."""
        ...

    def linear(self, x: Tensor, w: Weight, bias: Tensor | None = None, residual: Tensor | None = None, *, normed: bool = False) -> Tensor:
        """x [T, K] -> x @ w.T (+ bias [N]) (+ residual [T, N]). Block types quantise x to int8 per 32 values; blocks are summed in ascending
        order with explicit fma. `normed`: x comes from a norm of the whole row, so it has outliers: blocks whose largest magnitude is above 2.5
        times the mean of those of all the row's blocks get a second int8 plane (decision 5). Float types take no notice of it."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, N], weight float32 [N] -> float32 [T, N]: x * rsqrt(mean(x^2) + eps) * weight."""
        ...

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, heads*D], weight [D]: rms_norm of each head on its own (Qwen3 q/k norm)."""
        ...

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
        """x [T, heads*D]; cos_sin float32 [max_len, rotary_dim] (first half cos, second half sin); rotates the first rotary_dim of each head."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2F] (gate first) -> silu(gate) * up, [T, F]."""
        ...

    def store_kv(self, k: Tensor, v: Tensor, layer: KVLayer, out_cache_loc: Tensor) -> None:
        """k, v [T, Hkv*D] -> written at slots out_cache_loc int32 [T]."""
        ...

    def attention(self, q: Tensor, layer: KVLayer, meta: AttentionMeta, scale: float, window: int | None = None) -> Tensor:
        """q [T, H*D] -> [T, H*D]. Softmax in base e, scale applied to scores. `window`: keys > position - window only."""
        ...

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, N], rows int32 [R] -> [R, N]: only rows whose logits are needed go through the head."""
        ...

    def sample(self, logits: Tensor, state: Any) -> None:
        """logits float32 [R, V] (may be changed in place) and the sampler's static row state -> tokens and logprobs in `state`'s buffers.
        Order of operations: core/sampling_params.py."""
        ...


_table: KernelTable | None = None


def bind(table: KernelTable) -> None:
    """Choose the implementation for this process; called once by the runner."""
    global _table
    _table = table


def table() -> KernelTable:
    assert _table is not None, "kernels.ops.bind was not called"
    return _table


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised buffer: from the capture arena under capture, else from torch."""
    from rootlet.kernels.workspace import allocate

    return allocate(shape, dtype)
