"""What a component of the tree beside Full must do: it keeps one more kind of memory (window KV, state) on the nodes of the one tree.

The core owns structure, the locks of paths, and recency of Full; each component owns its value on a node, its holds, its recency and its two
counters. It returns `CacheAction`s and never touches an allocator. A node without the value is a tombstone for this component, and stays.

To add a component: slots in `UnifiedTreeNode` with their split rules, one class here, one allocator in `memory`, its law in `cache.invariants`.
Source: SGLang unified radix cache; cache.md section 6.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from rootlet.cache.actions import FreePages
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import PageArray, TreeLock

Gate: TypeAlias = Callable[[UnifiedTreeNode, int], bool]


class Copyable(Protocol):
    """The part of a component that copies between tiers need; Full has it too. `per_page`: a unit for each page of a node's key, which a split
    divides; else one unit, which belongs to the node's end."""

    @property
    def name(self) -> str: ...

    @property
    def per_page(self) -> bool: ...

    def units(self, node: UnifiedTreeNode) -> PageArray | None:
        """What the component holds on `node`, not to be changed; None for a tombstone."""
        ...

    def restore(self, node: UnifiedTreeNode, units: PageArray, tick: int) -> None:
        """The tombstone `node` takes over `units`, which a copy from the host has filled."""
        ...


class TreeComponent(Copyable, Protocol):
    """Counters are in units of the component's own allocator: `evictable` on nodes that nobody holds for it, `protected` on the others.
    `rank`: when a value is taken from a node that stays, values of lower rank on it go too."""

    @property
    def rank(self) -> int: ...

    @property
    def evictable(self) -> int: ...

    @property
    def protected(self) -> int: ...

    def num_pages(self, node: UnifiedTreeNode) -> int:
        """Units the component holds on `node`; 0 for a tombstone."""
        ...

    def needs(self, node: UnifiedTreeNode) -> Iterable[UnifiedTreeNode]:
        """The nodes whose values a request reads that goes on from `node`."""
        ...

    def gate(self, *, host: bool = False) -> Gate:
        """A predicate with memory, to be asked once at each node of a path, from the root down, with the tokens of the node that count
        (all of them, or the first part of an edge that a match ends in): may a match end there? `host`: values on the host count too."""
        ...

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode, num_pages: int) -> None:
        """`upper` takes what belongs to the first `num_pages` pages of `lower`; sums do not change."""
        ...

    def hold(self, lock: TreeLock) -> None:
        """Keep what a request that goes on from `lock.node` reads; written on the receipt."""
        ...

    def let_go(self, lock: TreeLock) -> None:
        """Undo `hold` of the same receipt; nothing when that was done."""
        ...

    def is_held(self, node: UnifiedTreeNode) -> bool: ...

    def touch(self, node: UnifiedTreeNode, tick: int) -> None:
        """A match or an insert ended at `node`."""
        ...

    def pop_victim(self) -> UnifiedTreeNode | None:
        """The node whose value goes first, out of the candidates; None when there is none."""
        ...

    def drop(self, node: UnifiedTreeNode) -> FreePages:
        """`node` gives its value, which nobody holds, up; the action says what to do with it."""
        ...

    def check(self, nodes: Sequence[UnifiedTreeNode], locks: Sequence[TreeLock]) -> None:
        """S6, C2, L3, E3, E4 of this component."""
        ...
