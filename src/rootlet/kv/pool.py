"""The door to KV memory: what attention and the runner may ask of a pool, whatever it stores.

Owns nothing. Page ids come from `memory`'s allocator in the control wing; a pool only holds the bytes behind them. Page 0 is the padding sink:
never handed out, zero at start, written by padding rows only.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from rootlet.kernels.ops import KVLayer


class TokenToKVPool(Protocol):
    """KV bytes of all layers, in pages 0..num_pages (0 = sink)."""

    num_pages: int
    page_size: int
    dtype: torch.dtype
    layout: str

    @property
    def num_layers(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Address space reserved, in bytes; untouched pages cost no memory."""
        ...

    def layer(self, layer_id: int) -> KVLayer:
        """Views of one layer; the pool keeps owning the memory."""
        ...


def lazy_zeros(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of zeros in private anonymous memory of its own: the system gives real pages at the first write."""
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return torch.frombuffer(mmap.mmap(-1, num_bytes, **flags), dtype=torch.uint8)
