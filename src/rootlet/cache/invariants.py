"""The laws of the prefix cache, recomputed from scratch: run after each turn in debug mode, and when idle.

Reads everything, changes nothing, trusts no counter. O(pool + tree). Each message starts with the id of its law (docs/invariants.md):

    C1 C2 C3 C4 C5 C7   conservation: of pages, window pages, state slots, of the counters, of rows, and in set form
    S1 S2 S3 S4 S5 S6 S7   structure of the tree        L1 L2 L3 L4 L5   locks
    E1 E3 E4   candidates and counters                  R1 R2 R4 R5   requests
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rootlet.cache import key as keys
from rootlet.cache.host_tier import HostLock
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.paths import path_from
from rootlet.cache.request_states import RequestStates
from rootlet.cache.request_window import RequestWindow
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import PageArray, ReqKvInfo, TreeLock
from rootlet.memory.ledger import Ledger
from rootlet.memory.page_allocator import PageAllocator
from rootlet.memory.req_to_token import ReqToTokenPool

if TYPE_CHECKING:
    from rootlet.cache.unified_radix_cache import UnifiedRadixCache


def check(cache: UnifiedRadixCache, *, live: Sequence[ReqKvInfo], locks: Sequence[TreeLock], host_locks: Sequence[HostLock]) -> None:
    """`live`: every request that holds a row (others are checked to hold nothing); `locks`: every live lock that is neither some `kv.lock` nor of
    a copy in flight; `host_locks`: likewise."""
    core = cache.core
    nodes = list(core.nodes())
    held = [kv.lock for kv in live if kv.lock is not None] + list(locks) + ([] if cache.host is None else cache.host.locks()[0])
    _check_structure(core, nodes)
    _check_locks(core, nodes, held)
    _check_requests(core, cache.req_to_token, live)
    _check_full(cache, nodes, live)
    core.full.check([node for node in nodes if node.evictable_leaf])
    for component in core.others:
        component.check(nodes, held)
    if cache.window is not None:
        _check_window(core, cache.window, nodes, live, flying=_flying(cache, cache.window.component.name))
    if cache.states is not None:
        _check_states(cache.states, nodes, live, flying=_flying(cache, cache.states.component.name))
    _check_host(cache, nodes, host_locks)


class _Counted(Protocol):
    @property
    def evictable(self) -> int: ...

    @property
    def protected(self) -> int: ...


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
        assert pages is not None or node.host is not None, f"S4: {node} has no pages"
        assert pages is None or len(pages) * page_bytes == len(node.key), f"S3: {len(pages)} pages on {node}"
        assert pages is None or parent.parent is None or parent.full_pages is not None, f"S5: parent of {node} has no pages"
        assert pages is not None or not (node.swa_pages is not None or node.state_slot is not None), f"S6: {node} has no pages, but more"
        assert pages is not None or not node.active, f"S5: {node} is locked and not on the device"
        on_device = sum(child.full_pages is not None for child in node.children.values())
        assert node.device_children == on_device, f"S5: {on_device} children of {node} are on the device, {node.device_children} counted"
        assert parent.parent is None or parent.priority >= node.priority, f"S5: priority rises from {parent} to {node}"


def _check_locks(core: UnifiedTreeCore, nodes: Sequence[UnifiedTreeNode], held: Sequence[TreeLock]) -> None:
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
        protected = {component.name: component.protected for component in core.others} | {core.full.name: core.full.protected}
        assert not any(protected.values()), f"L5: idle, yet protected: {protected}"
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


def _check_full(cache: UnifiedRadixCache, nodes: Sequence[UnifiedTreeNode], live: Sequence[ReqKvInfo]) -> None:
    full, rows, size = cache.core.full, cache.req_to_token, cache.core.page_size
    holders = [kv for kv in live if kv.row is not None]
    assert rows.num_free + len(holders) == rows.max_rows, f"C5: {rows.num_free} rows free, {len(holders)} held, of {rows.max_rows}"
    assert len({kv.row for kv in holders}) == len(holders), "C5: two requests hold one row"
    in_tree = sum(full.num_pages(node) for node in nodes)
    protected = sum(full.num_pages(node) for node in nodes if node.active)
    assert full.evictable + full.protected == in_tree, f"C2: evictable {full.evictable} + protected {full.protected} != {in_tree} in the tree"
    assert full.protected == protected, f"C2: {protected} pages are on locked paths, {full.protected} counted as protected"
    assert full.evictable == in_tree - protected, f"E4: {in_tree - protected} pages are evictable, {full.evictable} counted"
    private = [_private_pages(kv, rows, page_size=size) for kv in holders]
    in_nodes = [node.full_pages for node in nodes if node.full_pages is not None]
    _check_owners("C1", cache.allocator, full, in_tree=in_nodes, private=private, flying=_flying(cache, full.name))
    _check_private("C1", cache.keeper.private[full.name], private)


def _check_host(cache: UnifiedRadixCache, nodes: Sequence[UnifiedTreeNode], locks: Sequence[HostLock]) -> None:
    """C6: host pools, with what copies in flight go to. S4: marks of copies are those of copies in flight."""
    host = cache.host
    marks = {op for node in nodes for op in (node.backup_op, node.load_op) if op is not None}
    assert marks <= set(() if host is None else host.flying), f"S4: marks {marks} of copies that are not in flight"
    for op, copy in () if host is None else host.flying.items():
        for at in path_from(copy.node, copy.start):
            assert op == (at.load_op if copy.is_load else at.backup_op), f"S4: {at} does not know of copy {op}"
    if host is None:
        assert not any(node.host is not None or node.host_refs for node in nodes), "S4: host values without a tier"
        return
    host.tree.check(nodes, [*locks, *host.locks()[1]])
    for name, pool in cache.keeper.host_pools.items():
        Ledger(pool.num_free, host.tree.held[name], 0, 0, pool.num_pages, host.in_flight(name)).check("C6")
        owned = [pool.free_pages(), *(node.host[name] for node in nodes if node.host is not None and name in node.host)]
        owned += [copy.spans[name].host for copy in host.flying.values() if not copy.is_load and name in copy.spans]
        times = np.bincount(np.concatenate(owned), minlength=pool.num_pages + 1)
        assert times[0] == 0, f"C6: host unit 0 of {name} has an owner"
        assert (times[1:] == 1).all(), f"C6: host units {np.flatnonzero(times[1:] != 1) + 1} of {name} do not have one owner"


def _flying(cache: UnifiedRadixCache, name: str) -> list[PageArray]:
    """Device units that loads in flight go to."""
    loads = [] if cache.host is None else [copy for copy in cache.host.flying.values() if copy.is_load and name in copy.spans]
    return [span.device[span.device != 0] for span in (copy.spans[name] for copy in loads)]


def _check_private(law: str, counted: int, private: Sequence[PageArray]) -> None:
    held = sum(map(len, private))
    assert counted == held, f"{law}: requests hold {held} units of their own, {counted} counted as private"


def _check_owners(
    law: str, pool: PageAllocator, counted: _Counted, *, in_tree: Sequence[PageArray], private: Sequence[PageArray], flying: Sequence[PageArray]
) -> None:
    """Free list, tree, requests and copies in flight share no unit of `pool`, and miss none."""
    sizes = pool.num_free, counted.evictable, counted.protected, sum(map(len, private)), pool.num_pages, sum(map(len, flying))
    Ledger(*sizes).check(law)
    owned = np.concatenate([pool.free_pages(), *in_tree, *private, *flying])
    times = np.bincount(owned, minlength=pool.num_pages + 1)
    assert len(times) == pool.num_pages + 1, f"C7: page {len(times) - 1}, beyond the pool, has an owner"
    assert times[0] == 0, "C7: page 0 has an owner"
    assert (times[1:] == 1).all(), f"C7: pages {np.flatnonzero(times[1:] > 1) + 1} have two owners, {np.flatnonzero(times[1:] == 0) + 1} none"


def _private_pages(kv: ReqKvInfo, rows: ReqToTokenPool, *, page_size: int) -> PageArray:
    assert kv.row is not None, "C5: a request without a row has no private pages"
    return rows.pages(kv.row, kv.cache_protected_len // page_size, keys.num_pages(kv.kv_allocated_len, page_size))


def _check_window(
    core: UnifiedTreeCore, window: RequestWindow, nodes: Sequence[UnifiedTreeNode], live: Sequence[ReqKvInfo], *, flying: Sequence[PageArray]
) -> None:
    size, component, table = core.page_size, window.component, window.allocator.table
    holders = [kv for kv in live if kv.row is not None]
    private = []
    for kv in holders:
        assert kv.row is not None
        private.append(table.pages(kv.row, *window.own_range(kv)))
        assert kv.window_released_len % size == 0, f"R4: {kv} gave half a window page back"
        reads = range(max(0, kv.kv_committed_len - component.window_len), kv.kv_committed_len)
        cells = table.pages(kv.row, reads.start // size, keys.num_pages(kv.kv_committed_len, size)) if reads else ()
        assert all(cells), f"R4: the window of {kv} is not live: {cells}"
        borrowed = window.component.window_pages(kv.lock.node) if kv.lock is not None else ()
        first = reads.start // size
        stop = kv.cache_protected_len // size
        if first < stop:
            assert kv.lock is not None, f"L4: no lock covers {kv}"
            assert kv.lock.window_from is not None, f"L4: {kv} reads a window that it let go"
            assert np.array_equal(table.pages(kv.row, first, stop), borrowed[first:stop]), f"R2: window cells of row {kv.row} are not the tree's"
    in_nodes = [node.swa_pages for node in nodes if node.swa_pages is not None]
    _check_owners("C3", window.allocator.pages, component, in_tree=in_nodes, private=private, flying=flying)
    _check_private("C3", window.private_pages, private)


def _check_states(states: RequestStates, nodes: Sequence[UnifiedTreeNode], live: Sequence[ReqKvInfo], *, flying: Sequence[PageArray]) -> None:
    private = []
    for kv in live:
        lengths = [length for length, _ in kv.snapshots]
        assert lengths == sorted(set(lengths)), f"S6: snapshots of {kv} are not in order"
        assert all(kv.cache_protected_len < length <= kv.kv_committed_len for length in lengths), f"S6: a snapshot of {kv} is of no use"
        slots = [slot for _, slot in kv.snapshots] + ([] if kv.state_slot is None else [kv.state_slot])
        private.append(np.array(slots, dtype=np.int32))
    in_nodes = [np.array([node.state_slot], dtype=np.int32) for node in nodes if node.state_slot is not None]
    _check_owners("C4", states.allocator.pool, states.component, in_tree=in_nodes, private=private, flying=flying)
    _check_private("C4", states.private_slots, private)
