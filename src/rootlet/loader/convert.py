"""Raw tensors of a file -> weights that the kernels take: reinterpret bytes, convert what has no kernel, join rows.

Block types with a kernel and dense types stay as they are (views of the mapped file); every conversion is reported through `note`. Nothing here
knows names of tensors or models.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rootlet.formats.tensor import RawTensor, dequantize
from rootlet.kernels.ops import Weight
from rootlet.kernels.reference_blocks import dequantize_rows, is_block
from rootlet.quant.gguf_blocks import DENSE_DTYPES, common_kind, quantize_q8_0

DTYPE_KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def _bytes(raw: RawTensor) -> Tensor:
    """uint8 view of the tensor's bytes; the file stays mapped as long as the view lives. It is never written through."""
    return torch.from_numpy(np.ascontiguousarray(raw.data).reshape(-1).view(np.uint8))


def to_float32(raw: RawTensor) -> Tensor:
    """The values: float32 of `raw.shape`. Raises `BadModelFile` on a block type that the gguf library cannot decode."""
    if raw.kind in DENSE_DTYPES:
        return _bytes(raw).view(DENSE_DTYPES[raw.kind]).view(raw.shape).to(torch.float32)
    if is_block(raw.kind):
        return dequantize_rows(raw.kind, _bytes(raw).view(*raw.shape[:-1], -1))
    return torch.from_numpy(dequantize(raw)).view(raw.shape)


def to_weight(raw: RawTensor) -> Weight:
    """A matrix as the file stores it. `kind` may still be one without a kernel."""
    n, k = raw.shape
    if raw.kind in DENSE_DTYPES:
        return Weight(raw.kind, n, k, _bytes(raw).view(DENSE_DTYPES[raw.kind]).view(n, k))
    return Weight(raw.kind, n, k, _bytes(raw).view(n, -1))


def with_kernel(raw: RawTensor, *, dense_kind: str | None, note: Callable[[str], None]) -> Weight:
    """`raw` [N, K] as a weight whose kind has a kernel. `dense_kind` converts every matrix, quantised ones too (None = keep what has a kernel)."""
    has_kernel = is_block(raw.kind) or raw.kind in DENSE_DTYPES
    if has_kernel and dense_kind in (None, raw.kind):
        return to_weight(raw)
    target = dense_kind or "q8_0"
    note(f"{raw.kind} -> {target}")
    if has_kernel:
        return as_kind(to_weight(raw), target)
    n, k = raw.shape
    return as_kind(Weight("f32", n, k, to_float32(raw)), target)


def as_kind(weight: Weight, kind: str) -> Weight:
    """`weight` (a kind with a kernel) converted to `kind`: dense, or q8_0."""
    if weight.kind == kind:
        return weight
    assert weight.data is not None
    values = dequantize_rows(weight.kind, weight.data) if is_block(weight.kind) else weight.data.to(torch.float32)
    data = quantize_q8_0(values) if kind == "q8_0" else values.to(DENSE_DTYPES[kind])
    return Weight(kind, weight.n, weight.k, data)


def join_rows(parts: list[Weight], *, note: Callable[[str], None]) -> Weight:
    """One matrix of all rows in order. Parts of different kinds are brought to a common one first."""
    if len(parts) == 1:
        return parts[0]
    kind = common_kind([p.kind for p in parts])
    for part in parts:
        if part.kind != kind:
            note(f"{part.kind} -> {kind} (joined with another type)")
    data = torch.cat([d for p in parts if (d := as_kind(p, kind).data) is not None])
    return Weight(kind, data.shape[0], parts[0].k, data)
