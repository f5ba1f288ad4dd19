"""Attention by the bound kernel table over a paged pool: what every backend whose kernels read host tables shares.

Owns the step's `StepTables`; the KV bytes stay the pool's. A backend beside this file says which KV layout its kernels read and what they refuse.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rootlet.attention.base import AttentionLayer
from rootlet.attention.metadata import StepTables
from rootlet.core.step import Capacity, StepPlan
from rootlet.kernels import ops
from rootlet.kernels.ops import AttentionMeta
from rootlet.kv.pool import TokenToKVPool


class PagedAttention:
    """Satisfies `AttentionBackend`, but for `layout`, which the backend names."""

    __slots__ = ("_pool", "_tables")
    layout: ClassVar[str]

    def __init__(self, pool: TokenToKVPool, capacity: Capacity, num_kv_heads: int) -> None:
        assert pool.layout == self.layout, f"attention of layout {self.layout} over a {pool.layout} pool"
        self._pool = pool
        self._tables = StepTables(capacity, num_kv_heads)

    @property
    def meta(self) -> AttentionMeta:
        return self._tables.meta

    @property
    def out_cache_loc(self) -> Tensor:
        return self._tables.out_cache_loc

    def plan(self, plan: StepPlan) -> None:
        self._tables.fill(plan)

    def prep(self) -> None:
        """Nothing: kernels read the host's tables."""

    def attend(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H*D], k and v [T, Hkv*D] (k already rotated) -> [T, H*D]; K/V are in the pool afterwards."""
        kv = self._pool.layer(layer.layer_id)
        table = ops.table()
        table.store_kv(k, v, kv, self._tables.out_cache_loc)
        return table.attention(q, kv, self._tables.meta, layer.scale, layer.window)
