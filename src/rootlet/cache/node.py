"""A node of the radix tree: an edge of whole pages, and what each component keeps for it.

Plain state; `tree_core` is the only writer. A split keeps the node object as the LOWER part, because locks and handles name a node by its end,
and an end never moves:

    before   parent --[a b c d e f]--> node           start 0, end 6
    after    parent --[a b]--> upper --[c d e f]--> node   upper: new object, end 2; node: start 2, end 6

Locks pin the anchor only. `active` (pinned, or above a pinned node) is kept by counting active children, so a lock touches just the nodes
that become active; it is what the field calls lock_ref > 0.
"""

from __future__ import annotations

from rootlet.cache.types import PageArray
from rootlet.core.types import Namespace


class UnifiedTreeNode:
    """Every slot has a declared rule for what a split does with it; tests/unit/cache lists them."""

    __slots__ = (
        "active_children",  # children that are active
        "alive",  # False once removed: a handle to it is stale
        "backup_op",  # the copy to the host that is in flight, None = none
        "children",  # first page of the child's key -> child
        "created",  # tick of creation
        "device_children",  # children that have their pages on the device
        "end",  # tokens from the root to the end of this node
        "full_pages",  # FullComponent: page ids, one for each page of the key; None where only the host has them
        "hashes",  # of the blocks (pages) of the key, for KV events; None when nobody listens
        "hits",  # requests that used this node
        "host",  # component name -> its host units (a page each, or the one state); None = nothing; never without "full"
        "host_children",  # children that have their pages on the host
        "host_refs",  # live host locks that cover this node
        "key",  # the edge: int32 bytes, whole pages, empty for a root
        "load_op",  # the copy from the host that is in flight, None = none
        "namespace",  # of a root; None elsewhere
        "parent",
        "pins",  # live locks anchored here
        "priority",  # highest priority of a request that inserted over it
        "queued",  # has an entry in the heap of eviction candidates
        "seq",  # order of creation of the object: breaks ties
        "start",  # tokens from the root to the start of this node
        "state_refs",  # MambaComponent: live locks that hold the state here
        "state_slot",  # MambaComponent: the state after exactly `end` tokens, None = tombstone
        "state_tick",  # MambaComponent: last use
        "swa_pages",  # SWAComponent: window page ids, one for each page of the key, None = tombstone
        "swa_refs",  # SWAComponent: live locks whose window covers this node
        "swa_tick",  # SWAComponent: last use of the window
        "tick",  # last use (a counter, no wall clock)
    )

    def __init__(self, *, seq: int, tick: int, key: bytes, start: int, end: int, parent: UnifiedTreeNode | None) -> None:
        self.seq = seq
        self.tick = tick
        self.created = tick
        self.key = key
        self.start = start
        self.end = end
        self.parent = parent
        self.namespace: Namespace | None = None
        self.children: dict[bytes, UnifiedTreeNode] = {}
        self.full_pages: PageArray | None = None
        self.hits = 0
        self.priority = 0
        self.pins = 0
        self.active_children = 0
        self.device_children = 0
        self.host: dict[str, PageArray] | None = None
        self.host_children = 0
        self.host_refs = 0
        self.backup_op: int | None = None
        self.load_op: int | None = None
        self.alive = True
        self.queued = False
        self.hashes: list[bytes] | None = None
        self.swa_pages: PageArray | None = None
        self.swa_refs = 0
        self.swa_tick = tick
        self.state_slot: int | None = None
        self.state_refs = 0
        self.state_tick = tick

    @property
    def active(self) -> bool:
        """On the path of a live lock."""
        return self.pins > 0 or self.active_children > 0

    @property
    def evictable_leaf(self) -> bool:
        """E1: may leave the device now."""
        return self.full_pages is not None and not self.device_children and not self.active

    def __repr__(self) -> str:
        return f"UnifiedTreeNode(#{self.seq} [{self.start}, {self.end}) pins={self.pins} hits={self.hits} children={len(self.children)})"
