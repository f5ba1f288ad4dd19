"""Attention by the native kernels: blocked K, page sizes that divide the 128-key grid in whole blocks of 16."""

from __future__ import annotations

from rootlet.attention.base import attention_backends
from rootlet.attention.paged import PagedAttention
from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity
from rootlet.kernels.dispatch import NATIVE_PAGE_SIZES
from rootlet.kv.pool import TokenToKVPool


@attention_backends.register("cpu")
class CpuAttention(PagedAttention):
    """The pool must be "blocked"."""

    __slots__ = ()
    layout = "blocked"

    def __init__(self, pool: TokenToKVPool, capacity: Capacity, num_kv_heads: int) -> None:
        """Raises `BadConfig` for a page size that the kernels do not take."""
        if pool.page_size not in NATIVE_PAGE_SIZES:
            known = ", ".join(map(str, NATIVE_PAGE_SIZES))
            raise BadConfig(f"the native attention takes page sizes {known}, got {pool.page_size} (--page-size; the reference takes any)")
        super().__init__(pool, capacity, num_kv_heads)
