"""The host side of the radix tree: which nodes have a copy on the host, who keeps it there, which copy goes first.

It decides and books; copies between the tiers are `host_copies`', allocators and the tier `host_keeper`'s. A node may be

    on the device only        new, or its copy was given up
    on both                   after a backup, after a load-back, or recomputed by a request
    on the host only          its device values were evicted: a match walks on through it, a load-back or an insert brings it back

On the device a prefix of every path, and on the host too (S5): a copy is kept only below a copy. Each component has its host value beside the
node's full KV or not (a host tombstone); the host value of a window or a state goes alone, that of the full KV takes all with it.

cache.md 2.15; SGLang HiCache for the behaviour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rootlet.cache import key as keys
from rootlet.cache.actions import Announce, CacheAction, FreeHostPages
from rootlet.cache.components.base import Copyable
from rootlet.cache.events import HOST, BlockRemoved
from rootlet.cache.eviction import RecencyHeap
from rootlet.cache.host_tier import HostLock
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.paths import path_from, stored
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import PageArray


class HostTree:
    """Created by `HostKeeper`, which makes the core know it. `parts`: components by name, Full first. `held`: units on nodes, by component."""

    __slots__ = ("_core", "_heaps", "_num_values", "demoted_pages", "held", "num_locks", "parts")

    def __init__(self, core: UnifiedTreeCore) -> None:
        self._core = core
        self.parts: dict[str, Copyable] = {part.name: part for part in (core.full, *core.others)}
        self._heaps = {name: RecencyHeap(lambda node: (node.tick, node.end), self._is_free(name)) for name in self.parts}
        self._num_values: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.demoted_pages = 0
        self.num_locks = 0

    # ---- what the core tells ------------------------------------------------------------------------------------------------------------

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode, num_pages: int) -> None:
        """`upper` takes what belongs to the first `num_pages` pages of `lower`; locks and copies in flight cover both."""
        upper.host_refs, upper.backup_op, upper.load_op = lower.host_refs, lower.backup_op, lower.load_op
        if lower.host is None:
            return
        per_page = [name for name in lower.host if self.parts[name].per_page]
        upper.host = {name: lower.host[name][:num_pages].copy() for name in per_page}
        lower.host |= {name: lower.host[name][num_pages:].copy() for name in per_page}
        upper.host_children = 1
        self._num_values.update(per_page)
        self.offer(upper)

    # ---- locks --------------------------------------------------------------------------------------------------------------------------

    def lock(self, node: UnifiedTreeNode, start: int) -> HostLock:
        """No host value of the nodes of [start, node.end) goes until `unlock`, nor one of those above, which are no leaves."""
        self.num_locks += 1
        for at in path_from(node, start):
            at.host_refs += 1
        return HostLock(node, start, self._core.epoch)

    def unlock(self, lock: HostLock) -> None:
        """Raises: AssertionError L1 for a receipt that was released before or is of another epoch."""
        assert not lock.released, f"L1: {lock} is released twice"
        assert lock.epoch == self._core.epoch, f"L1: {lock} is of an earlier epoch than {self._core.epoch}"
        lock.released = True
        self.num_locks -= 1
        for at in path_from(lock.node, lock.start):
            assert at.host_refs > 0, f"L1: {at} has no host lock"
            at.host_refs -= 1
            self.offer(at)

    # ---- evict --------------------------------------------------------------------------------------------------------------------------

    def evict_leaf(self, *, max_pages: int) -> list[CacheAction]:
        """Give up the host copy that was used longest ago, of the nodes below which there is none; or just its tail. [] when there is none.

        A node that is on the device too stays there; another one leaves the tree."""
        victim = self._heaps[self._core.full.name].pop()
        if victim is None:
            return []
        assert victim.host is not None, f"S6: {victim} is not on the host"
        surplus = len(victim.host[self._core.full.name]) - max_pages
        if surplus > 0:
            self._core.split(victim, surplus * self._core.page_size)
        return self._drop_copy(victim)

    def evict_value(self, name: str) -> list[CacheAction]:
        """Give up the host value of a component beside Full that was used longest ago; a leaf that is nowhere else goes as a whole, since no
        match ends there any more. [] when there is none."""
        victim = self._heaps[name].pop()
        if victim is None:
            return []
        if victim.full_pages is None and self._is_free_leaf(victim):
            return self._drop_copy(victim)
        return [self._drop_value(victim, name)]

    # ---- views --------------------------------------------------------------------------------------------------------------------------

    def check(self, nodes: Sequence[UnifiedTreeNode], locks: Sequence[HostLock]) -> None:
        """E2, L3, S3, S5, S6 and C6 of the host side, recomputed from the nodes and the live locks."""
        refs, below = Counter[int](), Counter[int]()
        for lock in locks:
            refs.update(id(at) for at in path_from(lock.node, lock.start))
        held: Counter[str] = Counter()
        for node in reversed(nodes):
            assert node.host_refs == refs[id(node)], f"L3: {refs[id(node)]} host locks cover {node}, {node.host_refs} counted"
            assert node.host_children == below[id(node)], f"S5: {below[id(node)]} children of {node} are on the host, {node.host_children} counted"
            if node.host is None:
                continue
            parent = node.parent
            assert parent is not None, f"S1: {node} has no parent"
            below[id(parent)] += 1
            assert parent.parent is None or parent.host is not None, f"S5: the parent of {node} has no host copy"
            assert self._core.full.name in node.host, f"S6: {node} has host values of {list(node.host)} alone"
            for name, units in node.host.items():
                size = (node.end - node.start) // self._core.page_size if self.parts[name].per_page else 1
                assert len(units) == size, f"S3: {len(units)} host units of {name} on {node}"
                held[name] += size
        assert held == +self.held, f"C6: {dict(held)} host units are on nodes, {dict(self.held)} counted"
        assert self.num_locks == len(locks), f"L2: {len(locks)} host locks are held, {self.num_locks} counted"
        for name, heap in self._heaps.items():
            assert self._num_values[name] == sum(node.host is not None and name in node.host for node in nodes), f"E2: host values of {name}"
            heap.check(nodes)

    # ---- inside -------------------------------------------------------------------------------------------------------------------------

    def _is_free(self, name: str) -> Callable[[UnifiedTreeNode], bool]:
        if name == self._core.full.name:
            return self._is_free_leaf
        return lambda node: node.host is not None and name in node.host and not node.host_refs and node.backup_op is None

    def _is_free_leaf(self, node: UnifiedTreeNode) -> bool:
        """E2: its host copy may go."""
        return node.host is not None and not node.host_children and not node.host_refs and node.backup_op is None

    def offer(self, node: UnifiedTreeNode) -> None:
        """What is free of the host values of `node` is a candidate from now on."""
        for name in node.host or ():
            if self._is_free(name)(node):
                self._heaps[name].offer(node, num_values=self._num_values[name])

    def may_hold(self, node: UnifiedTreeNode, name: str) -> bool:
        """A host value of `name` is of use on `node`: the full KV below a copy or a root, others beside the full KV."""
        if name != self._core.full.name:
            return node.host is not None
        return node.parent is not None and (node.parent.parent is None or node.parent.host is not None)

    def hold(self, node: UnifiedTreeNode, name: str, units: PageArray) -> list[CacheAction]:
        """The host value of `name` on `node` is `units` from now on."""
        assert node.host is None or name not in node.host, f"S6: {node} has a host value of {name} already"
        self._num_values[name] += 1
        self.held[name] += len(units)
        is_first, node.host = node.host is None, {**(node.host or {}), name: units}
        self.offer(node)
        if not is_first:
            return []
        assert node.parent is not None, f"S1: {node} has no parent"
        node.parent.host_children += 1
        return [self.stored(node, HOST)] if self._core.announce else []

    def _drop_value(self, node: UnifiedTreeNode, name: str) -> CacheAction:
        assert node.host is not None, f"S6: {node} is not on the host"
        assert not node.host_refs, f"L3: the host values of {node} are held"
        units = node.host.pop(name)
        self._num_values[name] -= 1
        self.held[name] -= len(units)
        return FreeHostPages(name, units)

    def _drop_copy(self, node: UnifiedTreeNode) -> list[CacheAction]:
        assert self._is_free_leaf(node), f"E2: the host copy of {node} is in use"
        actions: list[CacheAction] = [self._drop_value(node, name) for name in list(node.host or ())]
        if node.hashes is not None:
            actions.append(Announce(BlockRemoved(tuple(node.hashes), HOST)))
        parent, node.host = node.parent, None
        assert parent is not None, f"S1: {node} has no parent"
        parent.host_children -= 1
        if node.full_pages is None:
            self._core.detach(node)
        self.offer(parent)
        return actions

    def stored(self, node: UnifiedTreeNode, medium: str) -> Announce:
        """`node` is on one more tier, `medium`."""
        root = node
        while root.parent is not None:
            root = root.parent
        assert root.namespace is not None, f"S7: {node} is under no namespace"
        block_bytes = self._core.page_size * keys.UNIT_BYTES
        return stored(node, root.namespace, block_bytes=block_bytes, medium=medium)
