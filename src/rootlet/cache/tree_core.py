"""The radix tree itself: walk, split, insert, lock, evict. It decides; what has to happen to pages it returns as `CacheAction`s.

Owns structure, locks, recency, hit counts and priorities. It does not see allocators, rows or requests (`unified_radix_cache` does), and leaves
each kind of memory to its component. One tree holds all namespaces: each has a root of its own, made by its first insert and gone with its last
child, so a per-request salt leaves nothing behind and a match across namespaces cannot be expressed.

    roots[ns] --[first pages ... ]--> node --[...]--> node          an edge is a whole number of pages
                     \\--[...]--> node                                children are keyed by their first page

Recency: each call that uses a path stamps only its deepest node; a removed child hands its stamp to its parent. Since leaves go first, that
orders victims exactly as stamping the whole path would. A zero-length match lands on `root`, which belongs to no namespace and is never evicted.

Nothing here recurses, so depth is bounded by memory only. Source: SGLang unified radix cache; cache.md sections 2 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rootlet.cache import key as keys
from rootlet.cache.actions import CacheAction, FreePages
from rootlet.cache.components.base import TreeComponent
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import PageArray, RadixKey
from rootlet.core.types import Namespace

_NO_PAGES: PageArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class InsertResult:
    """`node` ends at the page floor of the key. [0, present_len) was in the tree before; `borrowed` = the tree's pages for [protected, present_len),
    which must replace the caller's own before `actions` free those."""

    node: UnifiedTreeNode
    present_len: int
    borrowed: PageArray
    actions: tuple[CacheAction, ...]


class UnifiedTreeCore:
    """One tree over all namespaces. `page_size` tokens a page; `components[0]` is Full."""

    __slots__ = ("_page_bytes", "_seq", "_tick", "components", "epoch", "num_locks", "num_nodes", "page_size", "root", "roots")

    def __init__(self, *, page_size: int, components: Sequence[TreeComponent]) -> None:
        assert page_size >= 1, f"page_size {page_size} < 1"
        self.page_size = page_size
        self.components = tuple(components)
        self.epoch = 0
        self.num_locks = 0
        self.num_nodes = 0  # without roots
        self.roots: dict[Namespace, UnifiedTreeNode] = {}
        self._page_bytes = page_size * keys.UNIT_BYTES
        self._seq = 0
        self._tick = 0
        self.root = self._new_node(key=b"", start=0, end=0, parent=None)

    # ---- match -----------------------------------------------------------------------------------------------------------------------

    def match_len(self, key: RadixKey) -> int:
        """Tokens of the longest cached prefix, whole pages. Changes nothing. One memcmp an edge."""
        node, _, common = self._walk(self._root_of(key), key.data, self._limit(key))
        return node.end + common

    def match(self, key: RadixKey) -> UnifiedTreeNode:
        """The node that ends the longest cached prefix, which is split off if it ends inside an edge. Stamps it."""
        node, partial, common = self._walk(self._root_of(key), key.data, self._limit(key))
        if partial is not None:
            node = self.split(partial, common)
        if node.end == 0:
            return self.root
        self._tick += 1
        self._stamp(node)
        return node

    def path_pages(self, node: UnifiedTreeNode, *, start: int = 0) -> PageArray:
        """The tree's page ids for [start, node.end), int32, a copy. `start` must be a multiple of the page size."""
        parts: list[PageArray] = []
        while node.end > start:
            assert node.full_pages is not None, f"S4: {node} has no pages"
            assert node.parent is not None, f"S1: {node}, above the root, ends at {node.end}"
            parts.append(node.full_pages[max(0, start - node.start) // self.page_size :])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else _NO_PAGES

    # ---- insert ----------------------------------------------------------------------------------------------------------------------

    def insert(self, key: RadixKey, pages: PageArray, *, protected: UnifiedTreeNode, inserted_len: int, priority: int) -> InsertResult:
        """Make the page floor of `key` present, with the caller's `pages` (int32, one a page of it) where the tree has none.

        [0, protected.end) of `pages` is the tree's already, under the caller's lock on `protected`; the tree takes over [present_len, end) and
        returns the rest, duplicates of what it holds, to be freed. Hits count past `inserted_len` only: a request uses each node once.
        Raises: AssertionError R2 when `protected` is not on the path of `key`.
        """
        limit = self._limit(key)
        assert 0 < limit == len(pages) * self._page_bytes, f"S3: {len(pages)} pages for {limit} bytes of whole pages"
        self._tick += 1
        node, partial, common = self._walk(self._open_root(key), key.data, limit)
        if partial is not None:
            node = self.split(partial, common)
        present_len, limit_len = node.end, limit // keys.UNIT_BYTES
        assert _on_one_path(node, protected, limit_len=limit_len), f"R2: {protected}, which the caller has locked, is not on the path of its key"
        first, last = min(protected.end, present_len) // self.page_size, present_len // self.page_size
        borrowed = self.path_pages(node, start=first * self.page_size)
        if present_len < limit_len:
            node = self._add_leaf(node, key.data[present_len * keys.UNIT_BYTES : limit], pages[last:], priority=priority)
        self._count_use(node, inserted_len=inserted_len, priority=priority)
        self._stamp(node)
        actions = (FreePages(self.components[0].name, pages[first:last]),) if first < last else ()
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
        parent.children[self._first_page(upper)] = upper
        node.key, node.start, node.parent = node.key[cut:], upper.end, upper
        upper.children[self._first_page(node)] = node
        for component in self.components:
            component.split(upper, node, length // self.page_size)
        self.num_nodes += 1
        return upper

    # ---- locks -----------------------------------------------------------------------------------------------------------------------

    def lock(self, node: UnifiedTreeNode) -> None:
        """Nothing between `node` and its root is evicted until `unlock`. O(nodes that become active)."""
        assert node.alive, f"L1: lock on {node}, which was removed"
        self.num_locks += 1
        was_active = node.active
        node.pins += 1
        while not was_active and node.parent is not None:
            for component in self.components:
                component.protect(node)
            node = node.parent
            was_active = node.active
            node.active_children += 1

    def unlock(self, node: UnifiedTreeNode) -> None:
        """Undo one `lock` on the same node. O(nodes that become inactive).

        Raises: AssertionError when `node` has no lock.
        """
        assert node.pins > 0, f"L1: unlock of {node}, which has no lock"
        self.num_locks -= 1
        node.pins -= 1
        while not node.active and node.parent is not None:
            for component in self.components:
                component.unprotect(node)
            _offer_leaf(node, self.components)
            node = node.parent
            node.active_children -= 1

    # ---- evict -----------------------------------------------------------------------------------------------------------------------

    def evict_one(self, component: TreeComponent, *, max_pages: int) -> tuple[CacheAction, ...]:
        """Remove the evictable leaf that goes first, or just its tail when it holds more than `max_pages` pages; () when there is none.

        Trimming keeps the head of a long leaf usable, which at least as many requests can share as its tail.
        """
        victim = component.pop_victim()
        if victim is None:
            return ()
        surplus = component.num_pages(victim) - max_pages
        if surplus > 0:
            self.split(victim, surplus * self.page_size)
        return self._remove(victim)

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
        """(deepest node whose end is a prefix of data[:limit], child that goes on with part of its edge or None, tokens of that part)."""
        node, at, page_bytes = root, 0, self._page_bytes
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
        return UnifiedTreeNode(seq=self._seq, tick=self._tick, key=key, start=start, end=end, parent=parent)

    def _add_leaf(self, parent: UnifiedTreeNode, key: bytes, pages: PageArray, *, priority: int) -> UnifiedTreeNode:
        leaf = self._new_node(key=key, start=parent.end, end=parent.end + len(key) // keys.UNIT_BYTES, parent=parent)
        leaf.priority = priority
        self.components[0].adopt(leaf, pages)
        parent.children[self._first_page(leaf)] = leaf
        self.num_nodes += 1
        _offer_leaf(leaf, self.components)
        return leaf

    def _remove(self, node: UnifiedTreeNode) -> tuple[CacheAction, ...]:
        """Take an evictable leaf out of the tree. Its parent inherits its recency and may become a candidate; an empty namespace ends."""
        parent = node.parent
        assert parent is not None, f"S1: cannot remove the root {node}"
        assert node.evictable_leaf, f"E1: {node} is in use"
        del parent.children[self._first_page(node)]
        node.alive, node.parent = False, None
        self.num_nodes -= 1
        parent.tick = max(parent.tick, node.tick)
        if parent.namespace is not None and not parent.children:
            parent.alive = False
            del self.roots[parent.namespace]
        _offer_leaf(parent, self.components)
        return tuple(component.drop(node) for component in self.components)

    def _count_use(self, node: UnifiedTreeNode, *, inserted_len: int, priority: int) -> None:
        """One more request uses the path up to `node`, of which it used [0, inserted_len) before. Priorities never rise from parent to child,
        so the first ancestor that needs neither change ends the walk."""
        at: UnifiedTreeNode | None = node
        while at is not None and at.parent is not None and (at.end > inserted_len or at.priority < priority):
            at.hits += at.end > inserted_len
            at.priority = max(at.priority, priority)
            at = at.parent

    def _stamp(self, node: UnifiedTreeNode) -> None:
        node.tick = self._tick
        for component in self.components:
            component.touch(node, num_nodes=self.num_nodes)

    def _first_page(self, node: UnifiedTreeNode) -> bytes:
        return node.key[: self._page_bytes]


def _offer_leaf(node: UnifiedTreeNode, components: Sequence[TreeComponent]) -> None:
    """A node that became an unlocked leaf is a candidate for eviction from now on."""
    if node.evictable_leaf:
        for component in components:
            component.offer(node)


def _on_one_path(node: UnifiedTreeNode, protected: UnifiedTreeNode, *, limit_len: int) -> bool:
    """`protected` is an ancestor of `node` (or `node` itself); of a key that ends above it, `node` must be the ancestor."""
    if protected.end == 0:
        return True
    low, high = (protected, node) if protected.end <= node.end else (node, protected)
    at = high
    while at.end > low.end and at.parent is not None:
        at = at.parent
    return at is low and low.end == min(protected.end, limit_len)
