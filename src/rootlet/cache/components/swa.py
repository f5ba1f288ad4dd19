"""Sliding-window attention: window page ids on the nodes that some window still reads, tombstones on the others.

Owns `node.swa_pages`, `swa_refs`, `swa_tick`, the counters, and the mark of every window page the tree holds. A node has a page for each page
of its key, or none. With W = `window_len` keys visible (the query's own included), going on from length n needs [n - W, n) at most:

    root --[ tombstone ]--[ tombstone ]--[ W tokens ]--> a match may end here: the last W tokens are live
                                |<- hold ------------|   whole nodes, upwards until W tokens are covered; the receipt keeps the start

Nothing is missing above a path without tombstones, so there a match may end anywhere. A tombstone is revived when a request that computed its
tokens shares them. Leaves are cut to one window, so that holding a leaf holds one window. Source: SGLang unified radix cache; cache.md 2.4, 2.5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rootlet.cache.actions import FreePages
from rootlet.cache.components.base import Gate
from rootlet.cache.eviction import RecencyHeap
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import PageArray, TreeLock


class SWAComponent:
    """`num_total_pages`: size of the window pool, for the always-on test that no window page is ever adopted twice."""

    __slots__ = ("_candidates", "_in_tree", "evictable", "leaf_len", "num_values", "page_size", "protected", "window_len")

    name = "swa"
    per_page = True
    rank = 1

    def __init__(self, *, window_len: int, page_size: int, num_total_pages: int) -> None:
        self.window_len = window_len
        self.page_size = page_size
        self.leaf_len = -(-window_len // page_size) * page_size
        self.evictable = 0
        self.protected = 0
        self.num_values = 0
        self._in_tree: npt.NDArray[np.bool_] = np.zeros(num_total_pages + 1, dtype=np.bool_)
        self._candidates = RecencyHeap(
            lambda node: (node.swa_tick, node.end), lambda node: node.alive and node.swa_pages is not None and node.swa_refs == 0
        )

    def num_pages(self, node: UnifiedTreeNode) -> int:
        return 0 if node.swa_pages is None else len(node.swa_pages)

    def units(self, node: UnifiedTreeNode) -> PageArray | None:
        return node.swa_pages

    def restore(self, node: UnifiedTreeNode, units: PageArray, tick: int) -> None:
        self.adopt(node, units, tick)

    def needs(self, node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
        return self._segment(node)

    def gate(self, *, host: bool = False) -> Gate:
        run: float = math.inf

        def accept(node: UnifiedTreeNode, length: int) -> bool:
            nonlocal run
            live = node.swa_pages is not None or (host and node.host is not None and self.name in node.host)
            run = run + length if live else 0
            return run >= self.window_len

        return accept

    def window_pages(self, node: UnifiedTreeNode) -> PageArray:
        """[node.end / P]: the tree's window pages in the nodes that a lock on `node` will hold, 0 before and on tombstones."""
        pages: PageArray = np.zeros(node.end // self.page_size, dtype=np.int32)
        for at in self._segment(node):
            if at.swa_pages is not None:
                pages[at.start // self.page_size : at.end // self.page_size] = at.swa_pages
        return pages

    def adopt(self, node: UnifiedTreeNode, pages: PageArray, tick: int) -> None:
        """The tombstone `node` takes `pages` over from a request."""
        assert node.swa_pages is None, f"S6: {node} has window pages"
        assert len(pages) == (node.end - node.start) // self.page_size, f"S3: {len(pages)} window pages for {node}"
        assert pages.all(), f"C7: window page 0 for {node}: {pages}"
        assert not self._in_tree[pages].any(), f"C7: the tree holds window pages {pages[self._in_tree[pages]]} already"
        self._in_tree[pages] = True
        node.swa_pages = pages.copy()
        node.swa_tick = tick
        self.num_values += 1
        if node.swa_refs:
            self.protected += len(pages)
        else:
            self.evictable += len(pages)
            self._offer(node)

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode, num_pages: int) -> None:
        upper.swa_refs, upper.swa_tick = lower.swa_refs, lower.swa_tick
        pages = lower.swa_pages
        if pages is None:
            return
        upper.swa_pages, lower.swa_pages = pages[:num_pages].copy(), pages[num_pages:].copy()
        self.num_values += 1
        if not upper.swa_refs:
            self._offer(upper)

    def hold(self, lock: TreeLock) -> None:
        for node in self._segment(lock.node):
            if not node.swa_refs:
                self._move(node, 1)
            node.swa_refs += 1
            lock.window_from = node.start

    def let_go(self, lock: TreeLock) -> None:
        node = lock.node
        while lock.window_from is not None and node.parent is not None and node.start >= lock.window_from:
            assert node.swa_refs > 0, f"L1: {node} has no holder of its window"
            node.swa_refs -= 1
            if not node.swa_refs:
                self._move(node, -1)
            node = node.parent
        lock.window_from = None

    def is_held(self, node: UnifiedTreeNode) -> bool:
        return node.swa_refs > 0

    def touch(self, node: UnifiedTreeNode, tick: int) -> None:
        """Only what the next request reads, so that what lies behind the window ages."""
        for at in self._segment(node):
            at.swa_tick = tick

    def leave_behind(self, node: UnifiedTreeNode) -> None:
        """A branch grew to `node`. What nothing but this branch goes through, and no window of it reads any more, goes first from now on, so that
        the last window of an idle branch outlives what a busy one has passed. O(1) amortised: each is left behind once a use."""
        at, covered = node, 0
        while at.parent is not None and (covered < self.window_len or (len(at.children) == 1 and at.swa_tick)):
            if covered >= self.window_len:
                at.swa_tick = 0
                if at.swa_pages is not None and not at.swa_refs:
                    self._offer(at)
            covered += at.end - at.start
            at = at.parent

    def pop_victim(self) -> UnifiedTreeNode | None:
        return self._candidates.pop()

    def drop(self, node: UnifiedTreeNode) -> FreePages:
        pages = node.swa_pages
        assert pages is not None, f"S6: {node} has no window pages"
        assert not node.swa_refs, f"L3: the window of {node} is held"
        node.swa_pages = None
        self._in_tree[pages] = False
        self.num_values -= 1
        self.evictable -= len(pages)
        return FreePages(self.name, pages)

    def check(self, nodes: Sequence[UnifiedTreeNode], locks: Sequence[TreeLock]) -> None:
        """Holders, sizes, counters and candidates, recomputed from the nodes and the live locks."""
        refs = Counter[int]()
        for lock in locks:
            at = lock.node
            while lock.window_from is not None and at.parent is not None and at.start >= lock.window_from:
                refs[id(at)] += 1
                at = at.parent
        for node in nodes:
            assert node.swa_refs == refs[id(node)], f"L3: {refs[id(node)]} locks hold the window of {node}, {node.swa_refs} counted"
            pages = node.swa_pages
            assert pages is None or len(pages) * self.page_size == node.end - node.start, f"S3: window pages of {node}"
        protected = sum(self.num_pages(node) for node in nodes if node.swa_refs)
        evictable = sum(self.num_pages(node) for node in nodes) - protected
        assert self.protected == protected, f"C2: {protected} window pages are held, {self.protected} counted"
        assert self.evictable == evictable, f"E4: {evictable} window pages are evictable, {self.evictable} counted"
        assert self.num_values == sum(node.swa_pages is not None for node in nodes), f"E4: {self.num_values} windows counted"
        self._candidates.check(nodes)

    def _segment(self, node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
        """Nodes upwards from `node` until one window is covered; tombstones count."""
        covered = 0
        while covered < self.window_len and node.parent is not None:
            yield node
            covered += node.end - node.start
            node = node.parent

    def _move(self, node: UnifiedTreeNode, sign: int) -> None:
        """The window of `node` got its first holder (1) or lost its last (-1)."""
        moved = sign * self.num_pages(node)
        self.protected += moved
        self.evictable -= moved
        if sign < 0 and node.swa_pages is not None:
            self._offer(node)

    def _offer(self, node: UnifiedTreeNode) -> None:
        self._candidates.offer(node, num_values=self.num_values)
