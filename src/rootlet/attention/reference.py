"""Attention by the torch reference: plain K, any page size. Slow; runs where no compiler was at hand, and as the oracle of tests."""

from __future__ import annotations

from torch import Tensor

from rootlet.attention.base import AttentionLayer, attention_backends
from rootlet.attention.metadata import StepTables
from rootlet.core.step import Capacity, StepPlan
from rootlet.kernels import ops
from rootlet.kernels.ops import AttentionMeta
from rootlet.kv.pool import TokenToKVPool


@attention_backends.register("reference")
class ReferenceAttention:
    """Satisfies `AttentionBackend`. The pool must be "plain"."""

    __slots__ = ("_pool", "_tables")
    layout = "plain"

    def __init__(self, pool: TokenToKVPool, capacity: Capacity, num_kv_heads: int) -> None:
        assert pool.layout == self.layout, f"reference attention over a {pool.layout} pool"
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
        kv = self._pool.layer(layer.layer_id)
        table = ops.table()
        table.store_kv(k, v, kv, self._tables.out_cache_loc)
        return table.attention(q, kv, self._tables.meta, layer.scale, layer.window)
