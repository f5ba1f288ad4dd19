"""Full attention: each node on the device holds one page id for each page of its key; a node without is on the host only.

Owns `node.full_pages`, the counters, and the mark of every page the tree holds. Evicts leaves only, so what is left is prefix-closed (S5).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rootlet.cache.actions import FreePages
from rootlet.cache.eviction import EvictionPolicy, LazyHeap
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import PageArray


class FullComponent:
    """`num_total_pages`: size of the pool, for the always-on test that no page is ever adopted twice."""

    __slots__ = ("_candidates", "_in_tree", "evictable", "protected")

    name = "full"
    per_page = True

    def __init__(self, policy: EvictionPolicy, *, num_total_pages: int) -> None:
        self._candidates = LazyHeap(policy)
        self._in_tree: npt.NDArray[np.bool_] = np.zeros(num_total_pages + 1, dtype=np.bool_)
        self.evictable = 0
        self.protected = 0

    def num_pages(self, node: UnifiedTreeNode) -> int:
        return 0 if node.full_pages is None else len(node.full_pages)

    def units(self, node: UnifiedTreeNode) -> PageArray | None:
        return node.full_pages

    def restore(self, node: UnifiedTreeNode, units: PageArray, tick: int) -> None:
        """`node`, so far on the host only, is on the device with `units`, which nobody holds yet."""
        assert node.full_pages is None, f"S4: {node} is on the device already"
        assert node.parent is not None, f"S1: pages for the root {node}"
        assert node.parent.parent is None or node.parent.full_pages is not None, f"S5: the parent of {node} is not on the device"
        self.adopt(node, units)
        self.offer(node)

    def adopt(self, node: UnifiedTreeNode, pages: PageArray) -> None:
        assert not self._in_tree[pages].any(), f"C7: the tree holds pages {pages[self._in_tree[pages]]} already, under another key"
        self._in_tree[pages] = True
        node.full_pages = pages.copy()
        self.evictable += len(pages)
        if node.parent is not None:
            node.parent.device_children += 1

    def split(self, upper: UnifiedTreeNode, lower: UnifiedTreeNode, num_pages: int) -> None:
        pages = lower.full_pages
        if pages is None:
            return
        upper.device_children = 1
        upper.full_pages, lower.full_pages = pages[:num_pages].copy(), pages[num_pages:].copy()

    def protect(self, node: UnifiedTreeNode) -> None:
        moved = self.num_pages(node)
        self.evictable -= moved
        self.protected += moved

    def unprotect(self, node: UnifiedTreeNode) -> None:
        moved = self.num_pages(node)
        self.evictable += moved
        self.protected -= moved

    def offer(self, node: UnifiedTreeNode) -> None:
        """If `node` became an evictable leaf it is a candidate from now on."""
        if node.evictable_leaf:
            self._candidates.offer(node)

    def touch(self, node: UnifiedTreeNode, *, num_nodes: int) -> None:
        self._candidates.touch(node, num_nodes=num_nodes)

    def forget(self, *, num_nodes: int) -> None:
        """A candidate was removed for the sake of another component."""
        self._candidates.trim(num_nodes=num_nodes)

    def pop_victim(self) -> UnifiedTreeNode | None:
        return self._candidates.pop()

    def drop(self, node: UnifiedTreeNode) -> FreePages:
        pages = node.full_pages
        assert pages is not None, f"S4: {node} has no pages"
        node.full_pages = None
        self._in_tree[pages] = False
        self.evictable -= len(pages)
        if node.parent is not None:
            node.parent.device_children -= 1
        return FreePages(self.name, pages)

    def check(self, leaves: list[UnifiedTreeNode]) -> None:
        self._candidates.check(leaves)
