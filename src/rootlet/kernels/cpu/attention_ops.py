"""Native attention: checks shapes and hands addresses to the library. Contracts: `kernels/ops.py`; the kernel: csrc/attention.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from rootlet.kernels.cpu import _native
from rootlet.kernels.ops import AttentionMeta, KVLayer, empty
from rootlet.kernels.workspace import current_tape

MAX_HEAD_DIM = 512
KV_KINDS = (torch.float32, torch.float16, torch.int8)
"""Page types in the library's order (csrc/include/rootlet/attention.h)."""

_PARTIALS = torch.empty(1 << 20)
"""Scratch of the kernel that splits few long rows over the team; one for the process, since the team runs one op at a time."""

TOKENS = 0
"""The row space "tokens of the step" of a captured graph (csrc/include/rootlet/tensor_args.h)."""


def _check_rows(name: str, x: Tensor) -> None:
    fits = x.dtype == torch.float32 and x.dim() == 2 and x.stride(1) == 1
    assert fits, f"{name} must be float32 rows, got {x.dtype} with strides {x.stride()}"


def _check_layer(layer: KVLayer) -> None:
    assert layer.layout == "blocked", f"native attention over a {layer.layout} layer"
    assert layer.k.is_contiguous(), "pages of keys must be contiguous"
    assert layer.v.is_contiguous(), "pages of values must be contiguous"
    assert layer.k.dtype == layer.v.dtype, f"keys {layer.k.dtype}, values {layer.v.dtype}"
    assert layer.k.dtype in KV_KINDS, f"KV dtype {layer.k.dtype}"
    scaled = layer.k_scales is not None and layer.v_scales is not None
    assert scaled == (layer.k.dtype == torch.int8), f"{layer.k.dtype} pages with scales: {scaled}"
    assert layer.page_size in (16, 32, 64, 128), f"page size {layer.page_size}"
    assert layer.v.shape[3] <= MAX_HEAD_DIM, f"head dim {layer.v.shape[3]}, at most {MAX_HEAD_DIM}"


def _scales(layer: KVLayer) -> tuple[int, int]:
    return (0 if layer.k_scales is None else layer.k_scales.data_ptr(), 0 if layer.v_scales is None else layer.v_scales.data_ptr())


def store_kv(k: Tensor, v: Tensor, layer: KVLayer, out_cache_loc: Tensor) -> None:
    """k, v [T, Hkv*D] (rows may be strided) -> written at slots out_cache_loc int32 [>= T]."""
    _check_rows("k", k)
    _check_rows("v", v)
    _check_layer(layer)
    heads, dim = layer.v.shape[1], layer.v.shape[3]
    assert k.shape == v.shape == (k.shape[0], heads * dim), f"k {tuple(k.shape)}, v {tuple(v.shape)} for {heads} heads of {dim}"
    assert out_cache_loc.dtype == torch.int32, "out_cache_loc must be int32"
    assert out_cache_loc.shape[0] >= k.shape[0], f"{out_cache_loc.shape[0]} slots for {k.shape[0]} tokens"
    _native.store_kv(
        current_tape(), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), layer.k.data_ptr(), layer.v.data_ptr(), *_scales(layer),
        out_cache_loc.data_ptr(), k.shape[0], TOKENS, heads, dim, layer.page_size, KV_KINDS.index(layer.k.dtype),
    )  # fmt: skip


def attention(q: Tensor, layer: KVLayer, meta: AttentionMeta, scale: float, window: int | None = None) -> Tensor:
    """q [T, H*D] (rows may be strided) -> [T, H*D]; rows that no work item names are left unwritten."""
    _check_rows("q", q)
    _check_layer(layer)
    heads, dim = layer.v.shape[1], layer.v.shape[3]
    assert q.shape[1] % (heads * dim) == 0, f"q of {q.shape[1]} features over {heads} kv heads of {dim}"
    assert meta.page_size == layer.page_size, f"tables of page size {meta.page_size} over pages of {layer.page_size}"
    assert window is None or window >= 1, f"window {window}"
    out = empty(q.shape[0], q.shape[1])
    _native.attention(
        current_tape(), q.data_ptr(), q.stride(0), out.data_ptr(), layer.k.data_ptr(), layer.v.data_ptr(), *_scales(layer),
        meta.page_table.data_ptr(), meta.page_table.stride(0), meta.row_ids.data_ptr(), meta.qo_indptr.data_ptr(), meta.prefix_lens.data_ptr(),
        meta.order.data_ptr(), meta.work.data_ptr(), meta.num_work.data_ptr(), _PARTIALS.data_ptr(), _PARTIALS.numel(),
        q.shape[1] // dim, heads, dim, layer.page_size, KV_KINDS.index(layer.k.dtype),
        window or 0, scale,
    )  # fmt: skip
    return out
