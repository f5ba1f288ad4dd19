"""What a component of the tree must do: it keeps one kind of memory (full KV, window KV, state) on the nodes of the one tree.

The core owns structure, locks and recency, and calls the component at each turn of a node's life; the component owns its value on the node,
its two counters, and the choice of what to evict. It returns `CacheAction`s and never touches an allocator.

To add a component: a slot in `UnifiedTreeNode` with its split rule, one class here, one allocator in `memory`, its law in `cache.invariants`.
Source: SGLang unified radix cache; cache.md section 6.3.
"""

from __future__ import annotations

from typing import Protocol

from rootlet.cache.actions import CacheAction
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import PageArray


class TreeComponent(Protocol):
    """Counters are in pages of the component's own allocator: `evictable` on inactive nodes, `protected` on active ones."""

    @property
    def name(self) -> str: ...

    @property
    def evictable(self) -> int: ...

    @property
    def protected(self) -> int: ...

    def num_pages(self, node: UnifiedTreeNode) -> int:
        """Pages the component holds on `node`; 0 for a tombstone."""
        ...

    def adopt(self, node: UnifiedTreeNode, pages: PageArray) -> None:
        """The new, inactive `node` takes `pages` over from a request."""
        ...

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode, num_pages: int) -> None:
        """`upper` takes the first `num_pages` pages of what `lower` held; sums do not change."""
        ...

    def protect(self, node: UnifiedTreeNode) -> None:
        """`node` became active."""
        ...

    def unprotect(self, node: UnifiedTreeNode) -> None:
        """`node` became inactive."""
        ...

    def offer(self, node: UnifiedTreeNode) -> None:
        """`node` became an evictable leaf."""
        ...

    def touch(self, node: UnifiedTreeNode, *, num_nodes: int) -> None:
        """`node` was used; its recency is already up to date."""
        ...

    def pop_victim(self) -> UnifiedTreeNode | None:
        """The evictable leaf that goes first, out of the candidates; None when there is none."""
        ...

    def drop(self, node: UnifiedTreeNode) -> CacheAction:
        """The inactive `node` gives its value up; the action says what to do with it."""
        ...

    def check(self, leaves: list[UnifiedTreeNode]) -> None:
        """E1 for this component's candidates."""
        ...
