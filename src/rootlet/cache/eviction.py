"""Which cached prefix goes first: the policies, and the one heap that serves them all.

A policy maps a node to a key; the smallest key is evicted first, older nodes (`seq`) first among equals. Keys come from a tick counter and
never from the clock or from hash order, so two instances that saw the same calls evict the same nodes.

The heap is lazy: it is never searched or repaired in place. Entries are checked when they surface:

    dead, locked or grown children   -> dropped; the tree offers the node again when it becomes an evictable leaf
    key has changed                  -> put back with its present key (monotone policies) or dropped (others)
    else                             -> the victim

Putting back is right only if keys never fall, since a node whose key fell would surface too late. Policies say so with `monotone`; for the
others every touch of a candidate adds an entry, and the heap is compacted when stale ones outnumber the nodes. A victim costs O(log n).
Does not know pages or locks beyond `UnifiedTreeNode.evictable_leaf`. Source: SGLang `mem_cache/evict_policy.py` for the set of policies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from rootlet.cache.node import UnifiedTreeNode
from rootlet.core.registry import Registry

EvictionKey: TypeAlias = tuple[int, ...]
_Entry: TypeAlias = tuple[EvictionKey, int, int, UnifiedTreeNode]  # key, node.seq, number of the offer (so that nodes never compare), node

SLRU_HITS = 2
_SLACK = 1024


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """`key`: smaller goes first. `monotone`: the key of a node never falls while it lives."""

    key: Callable[[UnifiedTreeNode], EvictionKey]
    monotone: bool = True


POLICIES: Registry[EvictionPolicy] = Registry("eviction policy")
POLICIES.register("lru")(EvictionPolicy(lambda node: (node.tick,)))
POLICIES.register("lfu")(EvictionPolicy(lambda node: (node.hits, node.tick)))
POLICIES.register("fifo")(EvictionPolicy(lambda node: (node.created,)))
POLICIES.register("mru")(EvictionPolicy(lambda node: (-node.tick,), monotone=False))
POLICIES.register("filo")(EvictionPolicy(lambda node: (-node.created,)))
POLICIES.register("priority")(EvictionPolicy(lambda node: (node.priority, node.tick)))
POLICIES.register("slru")(EvictionPolicy(lambda node: (node.hits >= SLRU_HITS, node.tick)))


class LazyHeap:
    """Candidates for eviction under one policy. The tree calls `offer` when a node becomes an evictable leaf and `touch` when it was used."""

    __slots__ = ("_entries", "_key", "_monotone", "_num_offers")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = policy.key
        self._monotone = policy.monotone
        self._entries: list[_Entry] = []
        self._num_offers = 0

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, node: UnifiedTreeNode) -> None:
        """`node` may be evicted from now on. A monotone heap keeps one entry a node, whose key may lag behind."""
        if self._monotone and node.queued:
            return
        node.queued = True
        self._num_offers += 1
        heapq.heappush(self._entries, (self._key(node), node.seq, self._num_offers, node))

    def touch(self, node: UnifiedTreeNode, *, num_nodes: int) -> None:
        """The key of `node` may have changed. `num_nodes` of the tree bounds how many stale entries may gather."""
        if self._monotone or not node.evictable_leaf:
            return
        self.offer(node)
        if len(self._entries) > 2 * num_nodes + _SLACK:
            self._compact()

    def trim(self, *, num_nodes: int) -> None:
        """Nodes were removed that had not surfaced here: drop their entries when most must be stale."""
        if len(self._entries) > 2 * num_nodes + _SLACK:
            self._compact()

    def pop(self) -> UnifiedTreeNode | None:
        """Take the evictable leaf with the smallest key out of the heap; None when there is none. O(log n) amortised."""
        while self._entries:
            key, seq, offer, node = heapq.heappop(self._entries)
            if not node.evictable_leaf:
                node.queued = False
            elif (now := self._key(node)) == key:
                node.queued = False
                return node
            elif self._monotone:
                heapq.heappush(self._entries, (now, seq, offer, node))
        return None

    def check(self, leaves: Iterable[UnifiedTreeNode]) -> None:
        """E1: every evictable leaf is in the heap, under a key that lets it surface in time."""
        best: dict[int, EvictionKey] = {}
        for key, seq, _, _ in self._entries:
            best[seq] = min(key, best.get(seq, key))
        exact = {(key, seq) for key, seq, _, _ in self._entries}
        for node in leaves:
            now = self._key(node)
            held = node.seq in best and best[node.seq] <= now if self._monotone else (now, node.seq) in exact
            assert held, f"E1: evictable leaf {node} is not among the candidates"

    def _compact(self) -> None:
        """Keep one entry a candidate, under its present key. Runs after at least as many pushes or removals as it keeps entries: O(1) each."""
        valid: dict[int, _Entry] = {}
        for _, seq, offer, node in self._entries:
            node.queued = node.evictable_leaf
            if node.queued:
                valid[seq] = (self._key(node), seq, offer, node)
        self._entries = list(valid.values())
        heapq.heapify(self._entries)


class RecencyHeap:
    """Least recently used first, for what may be taken from any node and not only from leaves. `held(node)`: the node has something to take,
    and nobody holds it.

    Lazy like `LazyHeap`: one valid entry a node, whose key may lag behind. A key that falls needs a new `offer`, and the old entry is stale.
    Nodes may vanish without being popped here, so `offer` compacts when most entries must be stale.
    """

    __slots__ = ("_entries", "_held", "_key", "_valid")

    def __init__(self, key: Callable[[UnifiedTreeNode], EvictionKey], held: Callable[[UnifiedTreeNode], bool]) -> None:
        self._key = key
        self._held = held
        self._entries: list[tuple[EvictionKey, int, UnifiedTreeNode]] = []
        self._valid: dict[int, EvictionKey] = {}  # node.seq -> key of its valid entry

    def __len__(self) -> int:
        return len(self._entries)

    def offer(self, node: UnifiedTreeNode, *, num_values: int) -> None:
        """The value on `node` may be taken from now on. `num_values`: of the component, in all; bounds the stale entries."""
        key = self._key(node)
        if node.seq in self._valid and self._valid[node.seq] <= key:
            return
        self._valid[node.seq] = key
        heapq.heappush(self._entries, (key, node.seq, node))
        if len(self._entries) > 2 * num_values + _SLACK:
            self._valid = {seq: self._key(node) for _, seq, node in self._entries if self._held(node)}
            self._entries = [(key, seq, node) for seq, (key, node) in self._nodes().items()]
            heapq.heapify(self._entries)

    def pop(self) -> UnifiedTreeNode | None:
        """Take the node whose value was used longest ago out of the heap; None when there is none. O(log n) amortised."""
        while self._entries:
            key, seq, node = self._entries[0]
            if self._valid.get(seq) == key and self._held(node) and (now := self._key(node)) != key:
                self._valid[seq] = now
                heapq.heapreplace(self._entries, (now, seq, node))
                continue
            heapq.heappop(self._entries)
            if self._valid.get(seq) == key:
                del self._valid[seq]
                if self._held(node):
                    return node
        return None

    def check(self, nodes: Iterable[UnifiedTreeNode]) -> None:
        """E3: each node with a free value is in the heap, under a key that lets it surface in time."""
        entries = {(key, seq) for key, seq, _ in self._entries}
        for node in nodes:
            if self._held(node):
                key = self._valid.get(node.seq)
                surfaces = key is not None and (key, node.seq) in entries and key <= self._key(node)
                assert surfaces, f"E3: {node} is not among the candidates"

    def _nodes(self) -> dict[int, tuple[EvictionKey, UnifiedTreeNode]]:
        """Each node with a valid entry, once."""
        return {seq: (self._valid[seq], node) for _, seq, node in self._entries if seq in self._valid}
