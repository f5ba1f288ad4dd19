"""The radix tree itself: walk, split, insert, lock, evict. It decides; what has to happen to pages it returns as `CacheAction`s.

Owns structure, locks, recency, hit counts and priorities. It does not see allocators, rows or requests (`unified_radix_cache` does), and leaves
each kind of memory to its component: Full always, which holds what every node must have, and windows and states where the model has them. One
tree holds all namespaces: each has a root of its own, made by its first insert and gone with its last child, so a per-request salt leaves
nothing behind and a match across namespaces cannot be expressed.

    roots[ns] --[first pages ... ]--> node --[...]--> node          an edge is a whole number of pages
                     \\--[...]--> node                                children are keyed by their first page

Recency: each call that uses a path stamps only its deepest node; a removed child hands its stamp to its parent. Since leaves go first, that
orders victims exactly as stamping the whole path would. A zero-length match lands on `root`, which belongs to no namespace and is never evicted.

With windows or states a match ends at the deepest node that every component's gate accepts; the walk itself is that of the full KV.
With a host tier (`host`) nodes may be on the device, on the host, or on both; those on the device are a prefix of every path.
Nothing here recurses, so depth is bounded by memory only. Source: SGLang unified radix cache; cache.md sections 2 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rootlet.cache import key as keys
from rootlet.cache.actions import Announce, CacheAction, FreePages
from rootlet.cache.components.base import TreeComponent
from rootlet.cache.components.full import FullComponent
from rootlet.cache.events import BlockRemoved
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.paths import accepted, count_use, on_device, on_one_path, path_from, stored
from rootlet.cache.types import NO_PAGES, PageArray, RadixKey, TreeLock
from rootlet.core.types import Namespace

if TYPE_CHECKING:
    from rootlet.cache.host_tree import HostTree


@dataclass(frozen=True, slots=True)
class InsertResult:
    """`node` ends at the page floor of the key. [0, present_len) was on the device before; `borrowed` = the tree's pages for
    [protected, present_len), which must replace the caller's own before `actions` free those."""

    node: UnifiedTreeNode
    present_len: int
    borrowed: PageArray
    actions: tuple[CacheAction, ...]


class Reached(NamedTuple):
    """`node`: where a request can go on at once, the root for nowhere. `best`: where it could with what the host holds, `node` without a tier.
    `full_len`: tokens of which some tier has the full KV. `hit_lens`: tokens that each component would match on the device if it were alone with
    full attention, Full first."""

    node: UnifiedTreeNode
    best: UnifiedTreeNode
    full_len: int
    hit_lens: tuple[int, ...]


class UnifiedTreeCore:
    """One tree over all namespaces. `page_size` tokens a page; `others`: components beside Full, highest rank first; `announce`: nodes carry
    hashes of their blocks, and what comes or goes is announced."""

    __slots__ = (
        "_page_bytes", "_seq", "announce", "epoch", "full", "host", "num_locks", "num_nodes", "others", "page_size", "root", "roots", "tick",
    )  # fmt: skip

    def __init__(self, *, page_size: int, full: FullComponent, others: Sequence[TreeComponent] = (), announce: bool = False) -> None:
        assert page_size >= 1, f"page_size {page_size} < 1"
        self.page_size = page_size
        self.full = full
        self.others = tuple(others)
        self.announce = announce
        self.host: HostTree | None = None
        self.epoch = 0
        self.num_locks = 0
        self.num_nodes = 0  # without roots
        self.roots: dict[Namespace, UnifiedTreeNode] = {}
        self._page_bytes = page_size * keys.UNIT_BYTES
        self._seq = 0
        self.tick = 0
        self.root = self._new_node(key=b"", start=0, end=0, parent=None)

    # ---- match -----------------------------------------------------------------------------------------------------------------------

    def match_len(self, key: RadixKey, hint: UnifiedTreeNode | None = None) -> tuple[int, UnifiedTreeNode]:
        """Tokens of the longest prefix that is on the device, whole pages, and the deepest node that ends on the way. Changes nothing. One memcmp an
        edge.

        `hint`: that node of an earlier call for a beginning of the same sequence; if it is still in the tree, what was compared is not compared
        again.
        """
        limit = self._limit(key)
        start = hint if hint is not None and hint.alive and hint.parent is not None and hint.end * keys.UNIT_BYTES <= limit else self._root_of(key)
        node, partial, common = self._walk(start, key.data, limit)
        gated = self.others or self.host is not None
        return (accepted(node, partial, common, self.others)[1] if gated else node.end + common), node

    def match(self, key: RadixKey) -> Reached:
        """Where the longest cached prefix ends, which is split off if that is inside an edge. Stamps the path to it."""
        node, partial, common = self._walk(self._root_of(key), key.data, self._limit(key))
        if partial is not None:
            node = self.split(partial, common)
        full_len, best = node.end, node
        hit_lens: tuple[int, ...] = (on_device(node).end,)
        if self.others or self.host is not None:
            node, _, alone = accepted(best, None, 0, self.others)
            best = node if self.host is None else accepted(best, None, 0, self.others, host=True)[0]
            hit_lens += tuple(alone)
        if best.end == 0:
            return Reached(self.root, self.root, full_len, hit_lens)
        self.tick += 1
        self._stamp(best)
        if node is not best and node.end:
            for component in self.others:
                component.touch(node, self.tick)
        return Reached(node if node.end else self.root, best, full_len, hit_lens)

    def path_pages(self, node: UnifiedTreeNode, *, start: int = 0) -> PageArray:
        """The tree's page ids for [start, node.end), int32, a copy. `start` must be a multiple of the page size."""
        parts: list[PageArray] = []
        while node.end > start:
            assert node.full_pages is not None, f"S4: {node} has no pages"
            assert node.parent is not None, f"S1: {node}, above the root, ends at {node.end}"
            parts.append(node.full_pages[max(0, start - node.start) // self.page_size :])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else NO_PAGES

    # ---- insert ----------------------------------------------------------------------------------------------------------------------

    def insert(self, key: RadixKey, pages: PageArray, *, protected: UnifiedTreeNode, inserted_len: int, priority: int) -> InsertResult:
        """Make the page floor of `key` present, with the caller's `pages` (int32, one a page of it) where the tree has none.

        [0, protected.end) of `pages` is the tree's already, under the caller's lock on `protected`; the tree takes over [present_len, end) and
        returns the rest, duplicates of what it holds, to be freed. Hits count past `inserted_len` only: a request uses each node once.
        Raises: AssertionError R2 when `protected` is not on the path of `key`.
        """
        limit = self._limit(key)
        assert 0 < limit == len(pages) * self._page_bytes, f"S3: {len(pages)} pages for {limit} bytes of whole pages"
        self.tick += 1
        node, partial, common = self._walk(self._open_root(key), key.data, limit)
        if partial is not None:
            node = self.split(partial, common)
        above, limit_len = on_device(node), limit // keys.UNIT_BYTES
        present_len = above.end
        assert on_one_path(node, protected, limit_len=limit_len), f"R2: {protected}, which the caller has locked, is not on the path of its key"
        first, last = min(protected.end, present_len) // self.page_size, present_len // self.page_size
        borrowed = self.path_pages(above, start=first * self.page_size)
        actions: tuple[CacheAction, ...] = (FreePages(self.full.name, pages[first:last]),) if first < last else ()
        for at in path_from(node, above.end) if above is not node else ():  # on the host only so far: they take the caller's pages
            self.full.restore(at, pages[at.start // self.page_size : at.end // self.page_size], self.tick)
            if self.announce:
                actions += (stored(at, key.namespace, block_bytes=self._page_bytes),)
        if node.end < limit_len:
            start = node.end
            node = self._add_leaf(node, key.data[start * keys.UNIT_BYTES : limit], pages[start // self.page_size :], priority=priority)
            if self.announce:
                actions += (stored(node, key.namespace, block_bytes=self._page_bytes),)
        count_use(node, inserted_len=inserted_len, priority=priority)
        self._stamp(node)
        return InsertResult(node, present_len, borrowed, actions)

    def split(self, node: UnifiedTreeNode, length: int) -> UnifiedTreeNode:
        """Cut the first `length` tokens of the edge off into a new parent, which is returned. `node` stays the lower part, with its locks."""
        parent, cut = node.parent, length * keys.UNIT_BYTES
        assert parent is not None, f"S1: cannot split the root {node}"
        assert 0 < cut < len(node.key), f"S2: cannot split {node} at {length}"
        assert cut % self._page_bytes == 0, f"S2: a split at {length} would part a page"
        upper = self._new_node(key=node.key[:cut], start=node.start, end=node.start + length, parent=parent)
        upper.tick, upper.created, upper.hits, upper.priority = node.tick, node.created, node.hits, node.priority
        upper.active_children = int(node.active)
        parent.children[upper.key[: self._page_bytes]] = upper
        node.key, node.start, node.parent = node.key[cut:], upper.end, upper
        upper.children[node.key[: self._page_bytes]] = node
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[: length // self.page_size], node.hashes[length // self.page_size :]
        self.full.split(upper, node, length // self.page_size)
        for component in self.others:
            component.split(upper, node, length // self.page_size)
        if self.host is not None:
            self.host.split(upper, node, length // self.page_size)
        self.num_nodes += 1
        return upper

    # ---- locks -----------------------------------------------------------------------------------------------------------------------

    def lock(self, node: UnifiedTreeNode) -> TreeLock:
        """Nothing between `node` and its root is evicted until `unlock` of the receipt, nor what the other components hold for a request that
        goes on from `node`. O(nodes that become active)."""
        assert node.alive, f"L1: lock on {node}, which was removed"
        assert node.end == 0 or node.full_pages is not None, f"L1: lock on {node}, which is not on the device"
        self.num_locks += 1
        lock, at, was_active = TreeLock(node=node, epoch=self.epoch), node, node.active
        node.pins += 1
        while not was_active and at.parent is not None:
            self.full.protect(at)
            at = at.parent
            was_active = at.active
            at.active_children += 1
        for component in self.others:
            component.hold(lock)
        return lock

    def unlock(self, lock: TreeLock) -> None:
        """Undo one `lock`. O(nodes that become inactive).

        Raises: AssertionError L1 for a receipt that was released before or is of another epoch.
        """
        assert not lock.released, f"L1: {lock} is released twice"
        assert lock.epoch == self.epoch, f"L1: {lock} is of an earlier epoch than {self.epoch}"
        node = lock.node
        assert node.pins > 0, f"L1: unlock of {node}, which has no lock"
        lock.released = True
        for component in self.others:
            component.let_go(lock)
        self.num_locks -= 1
        node.pins -= 1
        while not node.active and node.parent is not None:
            self.full.unprotect(node)
            self.full.offer(node)
            node = node.parent
            node.active_children -= 1

    # ---- evict -----------------------------------------------------------------------------------------------------------------------

    def evict_leaf(self, *, max_pages: int) -> tuple[CacheAction, ...]:
        """Take the evictable leaf that goes first off the device, or just its tail when it holds more than `max_pages` pages; () when there is
        none. It leaves the tree, unless the host has a copy of it.

        Trimming keeps the head of a long leaf usable, which at least as many requests can share as its tail.
        """
        victim = self.full.pop_victim()
        if victim is None:
            return ()
        surplus = self.full.num_pages(victim) - max_pages
        if surplus > 0:
            self.split(victim, surplus * self.page_size)
        return self._remove(victim)

    def evict_value(self, component: TreeComponent) -> tuple[CacheAction, ...]:
        """Take the value of `component` that goes first; () when there is none.

        An evictable leaf goes as a whole, since no match ends there any more. From any other node go the value and those of lower rank.
        """
        victim = component.pop_victim()
        if victim is None:
            return ()
        if victim.evictable_leaf:
            actions = self._remove(victim)
            self.full.forget(num_nodes=self.num_nodes)
            return actions
        lower = [other for other in self.others if other.rank < component.rank and other.num_pages(victim)]
        assert not any(other.is_held(victim) for other in lower), f"L3: {victim} is held for less than its {component.name}"
        return tuple(each.drop(victim) for each in (component, *lower))

    def nodes(self) -> Iterator[UnifiedTreeNode]:
        """Every node but the roots, each parent before its children, older siblings first."""
        stack = [child for root in reversed(self.roots.values()) for child in reversed(root.children.values())]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    # ---- inside ----------------------------------------------------------------------------------------------------------------------

    def _limit(self, key: RadixKey) -> int:
        """Bytes of the key's whole pages."""
        return keys.floor_len(len(key), self.page_size) * keys.UNIT_BYTES

    def _walk(self, root: UnifiedTreeNode, data: bytes, limit: int) -> tuple[UnifiedTreeNode, UnifiedTreeNode | None, int]:
        """(deepest node whose end is a prefix of data[:limit], child that goes on with part of its edge or None, tokens of that part). `root` = the
        key's, or a node that is known to be on its path."""
        node, at, page_bytes = root, root.end * keys.UNIT_BYTES, self._page_bytes
        while at < limit:
            child = node.children.get(data[at : at + page_bytes])
            if child is None:
                break
            stop = at + len(child.key)
            if stop > limit or not data.startswith(child.key, at):
                length = (min(stop, limit) - at) // keys.UNIT_BYTES
                return node, child, keys.floor_len(keys.first_diff(child.key, 0, data, at, length=length), self.page_size)
            node, at = child, stop
        return node, None, 0

    def _root_of(self, key: RadixKey) -> UnifiedTreeNode:
        """The root of the key's namespace; the childless `root` when nothing was inserted there."""
        return self.roots.get(keys.normalise(key.namespace), self.root)

    def _open_root(self, key: RadixKey) -> UnifiedTreeNode:
        namespace = keys.normalise(key.namespace)
        if namespace not in self.roots:
            self.roots[namespace] = self._new_node(key=b"", start=0, end=0, parent=None)
            self.roots[namespace].namespace = namespace
        return self.roots[namespace]

    def _new_node(self, *, key: bytes, start: int, end: int, parent: UnifiedTreeNode | None) -> UnifiedTreeNode:
        self._seq += 1
        return UnifiedTreeNode(seq=self._seq, tick=self.tick, key=key, start=start, end=end, parent=parent)

    def _add_leaf(self, parent: UnifiedTreeNode, key: bytes, pages: PageArray, *, priority: int) -> UnifiedTreeNode:
        leaf = self._new_node(key=key, start=parent.end, end=parent.end + len(key) // keys.UNIT_BYTES, parent=parent)
        leaf.priority = priority
        self.full.adopt(leaf, pages)
        parent.children[leaf.key[: self._page_bytes]] = leaf
        self.num_nodes += 1
        self.full.offer(leaf)
        return leaf

    def _remove(self, node: UnifiedTreeNode) -> tuple[CacheAction, ...]:
        """Take an evictable leaf off the device, and out of the tree unless it is on the host. Its parent may become a candidate."""
        parent = node.parent
        assert parent is not None, f"S1: cannot remove the root {node}"
        assert node.evictable_leaf, f"E1: {node} is in use"
        gone = () if node.hashes is None else (Announce(BlockRemoved(tuple(node.hashes))),)
        actions = (self.full.drop(node), *(component.drop(node) for component in self.others if component.num_pages(node)), *gone)
        if node.host is None:
            self.detach(node)
        elif self.host is not None:
            self.host.demoted_pages += len(node.key) // self._page_bytes
        self.full.offer(parent)
        return actions

    def detach(self, node: UnifiedTreeNode) -> None:
        """`node` holds nothing any more and leaves the tree. Its parent inherits its recency; an empty namespace ends."""
        parent = node.parent
        assert parent is not None, f"S1: cannot remove the root {node}"
        assert not node.children, f"S5: {node} has children"
        del parent.children[node.key[: self._page_bytes]]
        node.alive, node.parent = False, None
        self.num_nodes -= 1
        parent.tick = max(parent.tick, node.tick)
        if parent.namespace is not None and not parent.children:
            parent.alive = False
            del self.roots[parent.namespace]

    def _stamp(self, node: UnifiedTreeNode) -> None:
        """A match or an insert used the path to `node`. With a host tier every node of it is stamped: one that leaves the device may stay."""
        at: UnifiedTreeNode | None = node
        while at is not None and at.parent is not None:
            at.tick = self.tick
            self.full.touch(at, num_nodes=self.num_nodes)
            at = None if self.host is None else at.parent
        for component in self.others:
            component.touch(node, self.tick)
