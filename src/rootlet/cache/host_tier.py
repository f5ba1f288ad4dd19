"""What a host tier (L2) is to the prefix cache: pools of host units, two thresholds, and somebody who copies.

The cache decides what is copied where, and keeps both ends of a copy until it is acknowledged; the tier moves bytes and knows no tree:

    insert ------> BackUp(op) --> tier.start --- ... copies ... ---> cache.host.acknowledge(op, ok=True): the nodes have a host copy
    load_back(match) -> LoadBack(op) --> tier.start --- ... ------> cache.host.acknowledge(op, ok=True): the nodes are on the device, match again

Several copies may be in flight. Acknowledgements come on the scheduler's thread, in any order, each exactly once; a failed copy changes nothing.
Without a tier nothing of this exists. Not here: copying itself, the store behind the host (L3), write-back at eviction. cache.md 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rootlet.cache.actions import HostCopy
from rootlet.cache.node import UnifiedTreeNode
from rootlet.memory.page_allocator import PageAllocator


class HostTier(Protocol):
    """Called on the scheduler's thread; never blocks."""

    @property
    def pools(self) -> Mapping[str, PageAllocator]:
        """Component name -> its host units, for every component of the tree. The cache is their one writer."""
        ...

    @property
    def write_through_hits(self) -> int:
        """Back a node up once so many requests have used it: 1 = at once, 2 = only what was seen again, 0 = never."""
        ...

    @property
    def min_load_len(self) -> int:
        """A shorter host hit is computed anew, in tokens."""
        ...

    def start(self, copy: HostCopy) -> None:
        """Begin, and return at once. `cache.host.acknowledge(copy.op, ok=...)` follows, later, once."""
        ...


@dataclass(slots=True)
class HostLock:
    """Receipt: the host values of the nodes of [start, node.end) are kept until its release. A split moves no offset, so it stays exact."""

    node: UnifiedTreeNode
    start: int
    epoch: int
    released: bool = False
