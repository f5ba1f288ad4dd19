"""Recurrent state (Mamba, linear attention): one slot at the end of a node, which encodes exactly `node.end` tokens, or a tombstone.

Owns `node.state_slot`, `state_refs`, `state_tick`, the counters, and the mark of every slot the tree holds. A state serves a match that ends
at its node and no other, so the gate looks at the node alone, and a lock holds the state of its anchor alone. A split leaves the state with
the lower part: the upper one ends at fewer tokens. Source: SGLang unified radix cache; cache.md 2.2, 2.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rootlet.cache.actions import FreePages
from rootlet.cache.components.base import Gate
from rootlet.cache.eviction import RecencyHeap
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import PageArray, TreeLock
from rootlet.memory.state_allocator import slot_array


class MambaComponent:
    """Counters are in slots."""

    __slots__ = ("_candidates", "_in_tree", "evictable", "protected")

    name = "mamba"
    per_page = False
    rank = 0

    def __init__(self) -> None:
        self.evictable = 0
        self.protected = 0
        self._in_tree: set[int] = set()
        self._candidates = RecencyHeap(
            lambda node: (node.state_tick, node.end), lambda node: node.alive and node.state_slot is not None and node.state_refs == 0
        )

    def num_pages(self, node: UnifiedTreeNode) -> int:
        return int(node.state_slot is not None)

    def units(self, node: UnifiedTreeNode) -> PageArray | None:
        return None if node.state_slot is None else slot_array(node.state_slot)

    def restore(self, node: UnifiedTreeNode, units: PageArray, tick: int) -> None:
        self.adopt(node, int(units[0]), tick)

    def needs(self, node: UnifiedTreeNode) -> Iterable[UnifiedTreeNode]:
        return (node,) if node.parent is not None else ()

    def gate(self, *, host: bool = False) -> Gate:
        def accept(node: UnifiedTreeNode, length: int) -> bool:
            live = node.state_slot is not None or (host and node.host is not None and self.name in node.host)
            return live and length == node.end - node.start

        return accept

    def adopt(self, node: UnifiedTreeNode, slot: int, tick: int) -> None:
        """The tombstone `node` takes `slot` over from a request."""
        assert node.state_slot is None, f"S6: {node} has a state"
        assert slot not in self._in_tree, f"C7: the tree holds state slot {slot} already"
        assert node.parent is not None, "S6: the state before any token is never kept"
        self._in_tree.add(slot)
        node.state_slot = slot
        node.state_tick = tick
        if node.state_refs:
            self.protected += 1
        else:
            self.evictable += 1
            self._offer(node)

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode, num_pages: int) -> None:
        upper.state_tick = lower.state_tick

    def hold(self, lock: TreeLock) -> None:
        node = lock.node
        if node.parent is None:
            return
        if not node.state_refs:
            self._move(node, 1)
        node.state_refs += 1
        lock.holds_state = True

    def let_go(self, lock: TreeLock) -> None:
        if not lock.holds_state:
            return
        node = lock.node
        assert node.state_refs > 0, f"L1: {node} has no holder of its state"
        node.state_refs -= 1
        if not node.state_refs:
            self._move(node, -1)
        lock.holds_state = False

    def is_held(self, node: UnifiedTreeNode) -> bool:
        return node.state_refs > 0

    def touch(self, node: UnifiedTreeNode, tick: int) -> None:
        node.state_tick = tick

    def pop_victim(self) -> UnifiedTreeNode | None:
        return self._candidates.pop()

    def drop(self, node: UnifiedTreeNode) -> FreePages:
        slot = node.state_slot
        assert slot is not None, f"S6: {node} has no state"
        assert not node.state_refs, f"L3: the state of {node} is held"
        node.state_slot = None
        self._in_tree.remove(slot)
        self.evictable -= 1
        return FreePages(self.name, slot_array(slot))

    def check(self, nodes: Sequence[UnifiedTreeNode], locks: Sequence[TreeLock]) -> None:
        """Holders, sizes, counters and candidates, recomputed from the nodes and the live locks."""
        refs = Counter(id(lock.node) for lock in locks if lock.holds_state)
        for node in nodes:
            assert node.state_refs == refs[id(node)], f"L3: {refs[id(node)]} locks hold the state of {node}, {node.state_refs} counted"
        protected = sum(self.num_pages(node) for node in nodes if node.state_refs)
        evictable = sum(self.num_pages(node) for node in nodes) - protected
        assert self.protected == protected, f"C2: {protected} states are held, {self.protected} counted"
        assert self.evictable == evictable, f"E4: {evictable} states are evictable, {self.evictable} counted"
        self._candidates.check(nodes)

    def _move(self, node: UnifiedTreeNode, sign: int) -> None:
        moved = sign * self.num_pages(node)
        self.protected += moved
        self.evictable -= moved
        if sign < 0 and node.state_slot is not None:
            self._offer(node)

    def _offer(self, node: UnifiedTreeNode) -> None:
        self._candidates.offer(node, num_values=self.evictable + self.protected)
