"""How much of each kind of memory could be handed out: now, or if somebody were released. Reads the cache; changes nothing in it.

Eviction makes room, so what counts is free and evictable, at this moment: a lock taken before the question changes the answer, as it should.
"""

from __future__ import annotations

from collections.abc import Sequence

from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import TreeLock
from rootlet.cache.unified_radix_cache import UnifiedRadixCache
from rootlet.scheduler.budget import ENDLESS, Room, ceil_pages, own_window_pages
from rootlet.scheduler.req import Req


class Rooms:
    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache

    def now(self) -> Room:
        """What could be handed out now: free and evictable."""
        if self._cache.window is None and self._cache.states is None:
            return Room(self._cache.available_pages)
        available = self._cache.keeper.available
        return Room(
            self._cache.available_pages,
            ENDLESS if self._cache.window is None else available(self._cache.window.component.name),
            ENDLESS if self._cache.states is None else available(self._cache.states.component.name),
        )

    def without(self, reqs: Sequence[Req]) -> Room:
        """`now` if these requests were released. Changes nothing."""
        pages = window_pages = states = 0
        held = [None if req.kv.lock is None else (req.kv.lock.window_from is not None, req.kv.lock.holds_state) for req in reqs]
        for req in reqs:
            kv = req.kv
            pages += ceil_pages(kv.kv_allocated_len, self._cache.page_size) - kv.cache_protected_len // self._cache.page_size
            window_pages += max(own_window_pages(req, self._cache.page_size), 0)
            states += len(kv.snapshots) + (kv.state_slot is not None)
            if kv.lock is not None:
                self._cache.dec_lock_ref(kv.lock)
        room = self.now()
        for req, before in zip(reqs, held, strict=True):
            if req.kv.lock is not None and before is not None:
                req.kv.lock = self._lock_again(req.kv.lock.node, window=before[0], state=before[1])
        return Room(room.pages + pages, room.window_pages + window_pages, room.states + states)

    def _lock_again(self, node: UnifiedTreeNode, *, window: bool, state: bool) -> TreeLock:
        """A lock as it was before it was released: its holder may have let `window` or `state` go."""
        lock = self._cache.inc_lock_ref(node)
        if self._cache.window is not None and not window:
            self._cache.window.component.let_go(lock)
        if self._cache.states is not None and not state:
            self._cache.states.component.let_go(lock)
        return lock
