"""A peer for `make bench-control`: a radix cache as SGLang's published design describes it, in plain Python, written from that description alone.

What it keeps of the published design, since its cost is what is compared: keys are lists of token ids; a node's children are a dictionary keyed by
their first page; two keys are compared element by element, or page by page when a page is longer than one; the key that remains is sliced off
at each node; a match splits the edge it ends in; each node on a path is stamped with the clock; a lock walks to the root; the evictable leaves
are a set, and each eviction makes a heap of all of them; a chunk's end is an insert, a second match, and the lock moved. Waiting requests are matched
anew in each pass, and a scratch tree of the queue is made for each pass.

Where it is kinder than the original: KV indexes are numpy arrays and not device tensors, and nothing is synchronised or translated.
Source: "SGLang: Efficient Execution of Structured Language Model Programs" (Zheng et al., 2024) and the walk through v0.5.9 in the design notes.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, dtype=np.int64)

MATCHED_QUEUE_LIMIT = 128
SHORT_MATCH_LEN = SHARED_LEN = 32


class BaselineNode:
    """An edge of whole pages and the slots of its tokens."""

    __slots__ = ("children", "key", "last_access_s", "lock_ref", "parent", "slots")

    def __init__(self, key: list[int], slots: Slots, parent: BaselineNode | None) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.children: dict[Hashable, BaselineNode] = {}
        self.lock_ref = 0
        self.last_access_s = time.monotonic()


@dataclass(slots=True, eq=False)
class BaselineReq:
    """A waiting or running request: its tokens, the slots of its row, and what it holds of the tree. `match_len` as of the last pass."""

    ids: list[int]
    row: Slots
    node: BaselineNode
    protected_len: int = 0
    match_len: int = 0


class BaselineRadixCache:
    """One tree. `free` takes the slots that are given back."""

    def __init__(self, page_size: int, free: Callable[[Slots], None] = lambda slots: None) -> None:
        self.page_size = page_size
        self.root = BaselineNode([], NO_SLOTS, None)
        self.root.lock_ref = 1
        self.evictable_leaves: set[BaselineNode] = set()
        self.evictable_len = 0
        self._free = free
        self._child_key: Callable[[list[int]], Hashable] = _first_token if page_size == 1 else self._first_page

    # ---- match and insert --------------------------------------------------------------------------------------------------------------

    def match_prefix(self, ids: list[int]) -> tuple[Slots, BaselineNode]:
        """(slots of the longest cached prefix in whole pages, node that ends it)."""
        key = ids[: len(ids) - len(ids) % self.page_size]
        now_s, node, parts = time.monotonic(), self.root, list[Slots]()
        node.last_access_s = now_s
        while key:
            child = node.children.get(self._child_key(key))
            if child is None:
                break
            child.last_access_s = now_s
            common = self._common_len(child.key, key)
            if common < len(child.key):
                node = self._split(child, common)
                parts.append(node.slots)
                break
            parts.append(child.slots)
            node, key = child, key[common:]
        return (np.concatenate(parts) if parts else NO_SLOTS), node

    def insert(self, ids: list[int], slots: Slots) -> int:
        """Make `ids` (whole pages) present; returns how many of them were before. The tree owns slots[that:] from now on."""
        now_s, node, key, present_len = time.monotonic(), self.root, ids, 0
        node.last_access_s = now_s
        while key:
            child = node.children.get(self._child_key(key))
            if child is None:
                break
            child.last_access_s = now_s
            common = self._common_len(child.key, key)
            present_len += common
            key, slots = key[common:], slots[common:]
            if common < len(child.key):
                node = self._split(child, common)
                break
            node = child
        if key:
            leaf = BaselineNode(key, slots.copy(), node)
            node.children[self._child_key(key)] = leaf
            self.evictable_len += len(key)
            self._update_leaf(leaf)
            self._update_leaf(node)
        return present_len

    def cache_unfinished_req(self, req: BaselineReq) -> None:
        """A chunk's end: insert, free what the tree had already, match again, point the row at the tree's slots, move the lock."""
        ids = req.ids[: len(req.ids) - len(req.ids) % self.page_size]
        present_len = self.insert(ids, req.row[: len(ids)].copy())
        self._free(req.row[req.protected_len : present_len])
        slots, node = self.match_prefix(ids)
        req.row[req.protected_len : len(slots)] = slots[req.protected_len :]
        self.dec_lock_ref(req.node)
        self.inc_lock_ref(node)
        req.node, req.protected_len = node, len(slots)

    # ---- locks and eviction ------------------------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: BaselineNode) -> None:
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable_len -= len(node.key)
            node.lock_ref += 1
            self._update_leaf(node)
            node = node.parent

    def dec_lock_ref(self, node: BaselineNode) -> None:
        while node.parent is not None:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_len += len(node.key)
            self._update_leaf(node)
            node = node.parent

    def evict(self, num_tokens: int) -> int:
        """Remove least recently used leaves until `num_tokens` are free; returns how many were."""
        heap = [(leaf.last_access_s, id(leaf), leaf) for leaf in self.evictable_leaves]
        heapq.heapify(heap)
        done = 0
        while done < num_tokens and heap:
            victim = heapq.heappop(heap)[2]
            parent = victim.parent
            assert parent is not None, "the root is never a candidate"
            self._free(victim.slots)
            done += len(victim.slots)
            del parent.children[self._child_key(victim.key)]
            self.evictable_leaves.discard(victim)
            self.evictable_len -= len(victim.key)
            self._update_leaf(parent)
            if parent in self.evictable_leaves:
                heapq.heappush(heap, (parent.last_access_s, id(parent), parent))
        return done

    # ---- inside ------------------------------------------------------------------------------------------------------------------------

    def _first_page(self, key: list[int]) -> Hashable:
        return tuple(key[: self.page_size])

    def _common_len(self, a: list[int], b: list[int]) -> int:
        """Equal leading tokens of two keys, in whole pages."""
        if self.page_size == 1:
            common = 0
            for x, y in zip(a, b, strict=False):
                if x != y:
                    break
                common += 1
            return common
        page, length, at = self.page_size, min(len(a), len(b)), 0
        while at < length and a[at : at + page] == b[at : at + page]:
            at += page
        return at

    def _split(self, child: BaselineNode, length: int) -> BaselineNode:
        """Cut the first `length` tokens off into a new parent, which is returned."""
        upper = BaselineNode(child.key[:length], child.slots[:length].copy(), child.parent)
        upper.lock_ref, upper.last_access_s = child.lock_ref, child.last_access_s
        assert child.parent is not None, "the root has no edge to split"
        child.parent.children[self._child_key(child.key)] = upper
        child.key, child.slots, child.parent = child.key[length:], child.slots[length:].copy(), upper
        upper.children[self._child_key(child.key)] = child
        return upper

    def _update_leaf(self, node: BaselineNode) -> None:
        if node.lock_ref == 0 and not node.children:
            self.evictable_leaves.add(node)
        else:
            self.evictable_leaves.discard(node)


def _first_token(key: list[int]) -> Hashable:
    return key[0]


def order_by_lpm(waiting: Sequence[BaselineReq], cache: BaselineRadixCache, *, limit: int = MATCHED_QUEUE_LIMIT) -> list[BaselineReq]:
    """The published `lpm`: beyond `limit` requests the order of arrival; else match each anew, followers of a family last, longest match first."""
    if len(waiting) > limit:
        return list(waiting)
    scratch, followers = BaselineRadixCache(cache.page_size), set[int]()
    for req in waiting:
        slots, req.node = cache.match_prefix(req.ids)
        req.match_len = len(slots)
        if req.match_len <= SHORT_MATCH_LEN:
            if len(scratch.match_prefix(req.ids)[0]) >= SHARED_LEN:
                followers.add(id(req))
            else:
                whole = req.ids[: len(req.ids) - len(req.ids) % cache.page_size]
                scratch.insert(whole, np.zeros(len(whole), dtype=np.int64))
    return sorted(waiting, key=lambda r: (id(r) in followers, -r.match_len))
