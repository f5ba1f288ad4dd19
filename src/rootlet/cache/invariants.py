"""The laws of the prefix cache, recomputed from scratch: run after each turn in debug mode, and when idle.

Reads everything, changes nothing, trusts no counter. O(pool + tree). Each message starts with the id of its law (docs/invariants.md):

    C1 C2 C5 C7   conservation: of pages, of the two counters, of rows, and in set form (nobody shares, nobody is missing)
    S1 S2 S3 S4 S5 S7   structure of the tree        L1 L2 L4 L5   locks        E1 E4   candidates and counters        R1 R2 R5   requests
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rootlet.cache import key as keys
from rootlet.cache.components.full import FullComponent
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import PageArray, ReqKvInfo, TreeLock
from rootlet.memory.ledger import Ledger
from rootlet.memory.page_allocator import PageAllocator
from rootlet.memory.req_to_token import ReqToTokenPool


def check(
    core: UnifiedTreeCore,
    full: FullComponent,
    *,
    allocator: PageAllocator,
    rows: ReqToTokenPool,
    live: Sequence[ReqKvInfo],
    locks: Sequence[TreeLock],
) -> None:
    """`live`: every request that holds a row (others are checked to hold nothing); `locks`: every live lock that is not some `kv.lock`."""
    nodes = list(core.nodes())
    _check_structure(core, nodes)
    _check_locks(core, nodes, live, locks)
    _check_requests(core, rows, live)
    _check_conservation(full, nodes, live, allocator=allocator, rows=rows, page_size=core.page_size)
    full.check([node for node in nodes if node.evictable_leaf])


def _check_structure(core: UnifiedTreeCore, nodes: Sequence[UnifiedTreeNode]) -> None:
    page_bytes = core.page_size * keys.UNIT_BYTES
    assert core.num_nodes == len(nodes), f"S1: {len(nodes)} nodes are reachable, {core.num_nodes} were counted"
    assert not core.root.children, "S7: the root without a namespace has children"
    for namespace, root in core.roots.items():
        assert root.parent is None, f"S1: the root of {namespace} has a parent"
        assert root.namespace == namespace == keys.normalise(namespace), f"S7: root of {namespace} says {root.namespace}"
        assert root.children, f"S7: the empty root of {namespace} was not removed"
        assert root.alive, f"S7: the root of {namespace} is dead"
    for node in nodes:
        parent, pages = node.parent, node.full_pages
        assert parent is not None, f"S1: {node} has no parent"
        assert parent.children.get(node.key[:page_bytes]) is node, f"S1: {node} is not the child of its parent"
        assert node.alive, f"S1: {node} is dead and in the tree"
        assert node.namespace is None, f"S7: {node} inside the tree claims a namespace"
        assert node.key, f"S2: the key of {node} is empty"
        assert len(node.key) % page_bytes == 0, f"S2: key of {node} is {len(node.key)} bytes"
        assert node.start == parent.end, f"S2: {node} does not start where its parent ends"
        assert (node.end - node.start) * keys.UNIT_BYTES == len(node.key), f"S2: key of {node} is {len(node.key)} bytes"
        assert pages is not None, f"S4: {node} has no pages"
        assert len(pages) * page_bytes == len(node.key), f"S3: {len(pages)} pages on {node}"
        assert parent.parent is None or parent.full_pages is not None, f"S5: parent of {node} has no pages"
        assert parent.parent is None or parent.priority >= node.priority, f"S5: priority rises from {parent} to {node}"


def _check_locks(core: UnifiedTreeCore, nodes: Sequence[UnifiedTreeNode], live: Sequence[ReqKvInfo], locks: Sequence[TreeLock]) -> None:
    held = [kv.lock for kv in live if kv.lock is not None] + list(locks)
    assert not any(lock.released or lock.epoch != core.epoch for lock in held), f"L1: a released or stale lock is held: {held}"
    assert len({id(lock) for lock in held}) == len(held), "L1: one receipt has two holders"
    pins = Counter(id(lock.node) for lock in held)
    below = Counter[int]()  # active children, recomputed
    for node in reversed(nodes):  # children before parents
        assert node.pins == pins.pop(id(node), 0), f"L2: pins of {node}"
        assert node.active_children == below[id(node)], f"L2: {below[id(node)]} active children below {node}, {node.active_children} counted"
        below[id(node.parent)] += node.active
    for root in core.roots.values():
        assert root.pins == 0, f"L2: root {root} is pinned"
        assert root.active_children == below[id(root)], f"L2: {below[id(root)]} active children below root {root}"
    assert core.root.pins == pins.pop(id(core.root), 0), f"L2: pins of {core.root}"
    assert not pins, "L4: a lock is anchored at a node that is not in the tree"
    if not held:
        assert core.num_locks == 0, f"L5: idle, yet {core.num_locks} locks"
        assert core.components[0].protected == 0, f"L5: idle, yet {core.components[0].protected} protected pages"
    assert core.num_locks == len(held), f"L2: {len(held)} locks are held, {core.num_locks} counted"


def _check_requests(core: UnifiedTreeCore, rows: ReqToTokenPool, live: Sequence[ReqKvInfo]) -> None:
    for kv in live:
        if kv.row is None:
            assert kv == ReqKvInfo(), f"R5: {kv} has no row and holds something"
            continue
        protected, allocated = kv.cache_protected_len, keys.num_pages(kv.kv_allocated_len, core.page_size)
        assert 0 <= protected <= kv.kv_committed_len <= kv.kv_allocated_len, f"R1: {kv}"
        assert protected % core.page_size == 0, f"R1: {kv} is protected up to the middle of a page"
        assert allocated <= rows.max_pages_per_row, f"R1: {kv} is longer than a row of {rows.max_pages_per_row} pages"
        if protected == 0:
            continue
        assert kv.lock is not None, f"L4: no lock covers {kv}"
        assert kv.lock.node.end == protected, f"L4: the lock of {kv} ends at {kv.lock.node.end}"
        borrowed = rows.pages(kv.row, 0, protected // core.page_size)
        assert np.array_equal(borrowed, core.path_pages(kv.lock.node)), f"R2: row {kv.row} names {borrowed}, not the tree's pages"


def _check_conservation(
    full: FullComponent,
    nodes: Sequence[UnifiedTreeNode],
    live: Sequence[ReqKvInfo],
    *,
    allocator: PageAllocator,
    rows: ReqToTokenPool,
    page_size: int,
) -> None:
    holders = [kv for kv in live if kv.row is not None]
    assert rows.num_free + len(holders) == rows.max_rows, f"C5: {rows.num_free} rows free, {len(holders)} held, of {rows.max_rows}"
    assert len({kv.row for kv in holders}) == len(holders), "C5: two requests hold one row"
    in_tree = sum(full.num_pages(node) for node in nodes)
    protected = sum(full.num_pages(node) for node in nodes if node.active)
    assert full.evictable + full.protected == in_tree, f"C2: evictable {full.evictable} + protected {full.protected} != {in_tree} in the tree"
    assert full.protected == protected, f"C2: {protected} pages are on locked paths, {full.protected} counted as protected"
    assert full.evictable == in_tree - protected, f"E4: {in_tree - protected} pages are evictable, {full.evictable} counted"
    private = [_private_pages(kv, rows, page_size=page_size) for kv in holders]
    Ledger(
        free=allocator.num_free,
        evictable=full.evictable,
        protected=full.protected,
        private=sum(map(len, private)),
        total=allocator.num_pages,
    ).check("C1")
    owned = np.concatenate([allocator.free_pages(), *(node.full_pages for node in nodes if node.full_pages is not None), *private])
    times = np.bincount(owned, minlength=allocator.num_pages + 1)
    assert len(times) == allocator.num_pages + 1, f"C7: page {len(times) - 1}, beyond the pool, has an owner"
    assert times[0] == 0, "C7: page 0 has an owner"
    assert (times[1:] == 1).all(), f"C7: pages {np.flatnonzero(times[1:] > 1) + 1} have two owners, {np.flatnonzero(times[1:] == 0) + 1} none"


def _private_pages(kv: ReqKvInfo, rows: ReqToTokenPool, *, page_size: int) -> PageArray:
    assert kv.row is not None, "C5: a request without a row has no private pages"
    return rows.pages(kv.row, kv.cache_protected_len // page_size, keys.num_pages(kv.kv_allocated_len, page_size))
