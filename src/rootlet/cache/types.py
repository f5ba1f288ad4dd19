"""What the scheduler and the prefix cache say to each other. Page ids and node handles; no tensors.

Ownership (cache.md 1.2): every page is at any instant in exactly one of: free list, one tree node, one request's private range.
In a row, [0, cache_protected_len) is borrowed from the tree under a lock, [cache_protected_len, kv_allocated_len) is the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rootlet.core.types import Namespace

if TYPE_CHECKING:
    from rootlet.cache.node import UnifiedTreeNode

PageArray = npt.NDArray[np.int32]
NO_PAGES: PageArray = np.empty(0, dtype=np.int32)


class EvictReason(StrEnum):
    """What a cached unit was given up for."""

    ADMISSION = "admission"  # pages, or a working state, of a request that starts
    GROWTH = "growth"  # the next positions of a running request
    SNAPSHOT = "snapshot"  # a copy of a running request's state
    LOAD_BACK = "load_back"  # device units that a copy from the host goes to
    HOST_PRESSURE = "host_pressure"  # host units that a backup goes to
    FLUSH = "flush"
    REQUESTED = "requested"  # somebody asked for free pages and said no more


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
    """Usable only while locked: lock before anything that may evict. `pages` are the tree's, `device_prefix_len` a multiple of the page size.

    With windows, `window_pages` is as long as `pages`: the tree's window pages where the lock will keep them, 0 before. With windows or states
    the full KV may be cached further than the match reaches: a request that stops at `branch_at` and shares there makes the next one hit.

    With a host tier the prefix up to `best_match_node`, `host_hit_length` tokens more, could be had by `cache.host.load_back`.
    """

    device_prefix_len: int
    last_device_node: UnifiedTreeNode
    pages: PageArray
    host_hit_length: int = 0
    best_match_node: UnifiedTreeNode | None = None
    window_pages: PageArray | None = None
    branch_at: int | None = None


@dataclass(slots=True)
class TreeLock:
    """Receipt of `inc_lock_ref`: released exactly once, on the same node, in the same epoch of the tree.

    `window_from`: the window pages of the nodes from here to the end of `node` are held, None = none are. A split moves no offset, so the
    receipt stays exact. `holds_state`: the state at the end of `node` is held.
    """

    node: UnifiedTreeNode
    epoch: int
    released: bool = False
    window_from: int | None = None
    holds_state: bool = False


@dataclass(slots=True)
class ReqKvInfo:
    """One request's ownership record. 0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len; protected is page-aligned.

    `row` None <=> holds no KV. `cache_inserted_len`: [0, here) this request itself already inserted (hits counted once).
    Window pages reach up to `window_allocated_len`; of its own ones it gave back those of [cache_protected_len, window_released_len). `state_slot`
    is the working state, which encodes kv_committed_len tokens; `snapshots` are (length, slot) of copies of it, oldest first.
    """

    row: int | None = None
    cache_protected_len: int = 0
    cache_inserted_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    lock: TreeLock | None = None
    window_released_len: int = 0
    window_allocated_len: int = 0
    state_slot: int | None = None
    snapshots: list[tuple[int, int]] = field(default_factory=list)

    def check(self, page_size: int) -> None:
        """Invariant R1."""
        assert 0 <= self.cache_protected_len <= self.kv_committed_len <= self.kv_allocated_len, self
        assert self.cache_protected_len % page_size == 0, self
