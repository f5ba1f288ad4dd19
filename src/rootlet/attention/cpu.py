"""Attention by the native kernels: blocked K, page sizes that divide the 128-key grid in whole blocks of 16."""

from __future__ import annotations

from torch import Tensor

from rootlet.attention.base import AttentionLayer, attention_backends
from rootlet.attention.metadata import StepTables
from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity, StepPlan
from rootlet.kernels import ops
from rootlet.kernels.ops import AttentionMeta
from rootlet.kv.pool import TokenToKVPool

PAGE_SIZES = (16, 32, 64, 128)


@attention_backends.register("cpu")
class CpuAttention:
    """Satisfies `AttentionBackend`. The pool must be "blocked"."""

    __slots__ = ("_pool", "_tables")
    layout = "blocked"

    def __init__(self, pool: TokenToKVPool, capacity: Capacity, num_kv_heads: int) -> None:
        if pool.page_size not in PAGE_SIZES:
            known = ", ".join(map(str, PAGE_SIZES))
            raise BadConfig(f"the native attention takes page sizes {known}, got {pool.page_size} (--page-size; the reference takes any)")
        assert pool.layout == self.layout, f"native attention over a {pool.layout} pool"
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
