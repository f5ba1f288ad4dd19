"""What the scheduler and the prefix cache say to each other. Page ids and node handles; no tensors.

Ownership (cache.md 1.2): every page is at any instant in exactly one of: free list, one tree node, one request's private range.
In a row, [0, cache_protected_len) is borrowed from the tree under a lock, [cache_protected_len, kv_allocated_len) is the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rootlet.core.types import Namespace

if TYPE_CHECKING:
    from rootlet.cache.node import UnifiedTreeNode

PageArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RadixKey:
    """`data` = token ids as little-endian int32 bytes; only the first `key_limit` tokens may match (None = all)."""

    namespace: Namespace
    data: bytes
    key_limit: int | None = None

    def __len__(self) -> int:
        n = len(self.data) // 4
        return n if self.key_limit is None else min(n, max(self.key_limit, 0))


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Usable only while locked: lock before anything that may evict. `pages` are the tree's, `device_prefix_len` a multiple of the page size."""

    device_prefix_len: int
    last_device_node: UnifiedTreeNode
    pages: PageArray
    host_hit_length: int = 0


@dataclass(slots=True)
class TreeLock:
    """Receipt of `inc_lock_ref`: released exactly once, on the same node, in the same epoch of the tree."""

    node: UnifiedTreeNode
    epoch: int
    released: bool = False


@dataclass(slots=True)
class ReqKvInfo:
    """One request's ownership record. 0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len; protected is page-aligned.

    `row` None <=> holds no KV. `cache_inserted_len`: [0, here) this request itself already inserted (hits counted once).
    """

    row: int | None = None
    cache_protected_len: int = 0
    cache_inserted_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    lock: TreeLock | None = None
    last_node: UnifiedTreeNode | None = None

    def check(self, page_size: int) -> None:
        """Invariant R1."""
        assert 0 <= self.cache_protected_len <= self.kv_committed_len <= self.kv_allocated_len, self
        assert self.cache_protected_len % page_size == 0, self


CacheStats = dict[str, Any]
