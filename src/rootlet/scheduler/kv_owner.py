"""Who holds which KV: the only place of the scheduler that talks to the cache and the page table (the owner of both is their own room).

Pages of the whole prompt are taken at admission, so a chunk never runs short half-way; decoding takes a page when it crosses a page edge.
Freed rows and pages may be handed out at once: executors run plans in order and page tables change only with the plans, so whoever gets them
next is ordered after the last plan that named them (architecture D2; scheduler.md 3.1, O6, O7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rootlet.cache.events import AllBlocksCleared, EventRecorder, EventSink
from rootlet.cache.registry import build_cache
from rootlet.cache.types import EvictReason, MatchResult, RadixKey, ReqKvInfo, TreeLock
from rootlet.config.schema import CacheArgs
from rootlet.core.step import Capacity, IntArray, PageDelta
from rootlet.scheduler.budget import ceil_pages
from rootlet.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class LockedMatch:
    """A match and the lock that keeps it: handed to `admit`, or given back with `unlock`."""

    match: MatchResult
    lock: TreeLock

    @property
    def prefix_len(self) -> int:
        return self.match.device_prefix_len


class KvOwner:
    """Rows, pages and locks of requests. Raises nothing a user can cause; AssertionError when admission promised what is not there."""

    def __init__(self, capacity: Capacity, args: CacheArgs, *, events: EventSink | None = None) -> None:
        """`events`: told what comes and goes in the cache, beginning with "nothing is there"."""
        self.page_size = capacity.page_size
        self.num_pages = capacity.num_pages
        self.enabled = args.prefix_cache
        self._sink = events
        self._recorder = None if events is None else EventRecorder(replay_batches=0)  # the publisher keeps what can be had again
        if self._recorder is not None:
            self._recorder.record(AllBlocksCleared())
        self.cache = build_cache(args, capacity, recorder=self._recorder)
        self.allocator, self.req_to_token = self.cache.allocator, self.cache.req_to_token

    def probe(self, req: Req) -> int:
        """Tokens that a match would give now; touches nothing."""
        return self.cache.probe(req.key(req.num_tokens, limit=req.match_limit()))

    def match(self, req: Req) -> LockedMatch:
        """Longest cached prefix, locked. Caller must `admit` or `unlock` it."""
        match = self.cache.match_prefix(req.key(req.num_tokens, limit=req.match_limit()))
        return LockedMatch(match, self.cache.inc_lock_ref(match.last_device_node))

    def lock_prefix(self, key: RadixKey) -> LockedMatch:
        """As `match`, for a prefix that is no request's."""
        match = self.cache.match_prefix(key)
        return LockedMatch(match, self.cache.inc_lock_ref(match.last_device_node))

    def unlock(self, locked: LockedMatch) -> None:
        self.cache.dec_lock_ref(locked.lock)

    def admit(self, req: Req, locked: LockedMatch) -> None:
        """Give `req` a row: the matched pages (borrowed, the lock becomes the request's) and fresh ones up to `req.num_tokens`."""
        assert req.kv.row is None, f"I3 {req.rid} already holds row {req.kv.row}"
        row = self.req_to_token.alloc_row()
        assert row is not None, "admission counted rows wrongly"
        kv, prefix_pages = req.kv, locked.prefix_len // self.page_size
        kv.row, kv.lock = row, locked.lock
        # cache_inserted_len stays 0: the first insert counts this request's use of the matched nodes too (lfu, slru).
        kv.cache_protected_len = kv.kv_committed_len = kv.kv_allocated_len = locked.prefix_len
        if prefix_pages:
            self.req_to_token.write(row, 0, locked.match.pages)
        self._take(kv, ceil_pages(req.num_tokens, self.page_size) - prefix_pages, EvictReason.ADMISSION)
        kv.kv_allocated_len = req.num_tokens

    def _take(self, kv: ReqKvInfo, num_pages: int, reason: EvictReason) -> None:
        if num_pages <= 0:
            return
        pages = self.cache.alloc_pages(num_pages, reason=reason)
        assert pages is not None, f"admission promised {num_pages} pages, the pool has {self.cache.available_pages}"
        assert kv.row is not None
        self.req_to_token.write(kv.row, ceil_pages(kv.kv_allocated_len, self.page_size), pages)

    def pages_for_next(self, req: Req) -> int:
        """Pages that the next decode step of `req` needs (0 or 1); KV length decides, not token length."""
        size = self.page_size  # written out: once a row and step
        return -(-(req.planned + 1) // size) - -(-req.kv.kv_allocated_len // size)

    def grow(self, req: Req) -> None:
        """Make room for the token at `req.planned`; the caller has ensured the page."""
        kv, end = req.kv, req.planned + 1
        if end > kv.kv_allocated_len:
            self._take(kv, self.pages_for_next(req), EvictReason.GROWTH)
            kv.kv_allocated_len = end

    def checkpoint(self, req: Req, length: int) -> None:
        """Publish the first `length` tokens (their step has run) while the request goes on; whole pages only."""
        self.cache.cache_unfinished_req(req.kv, req.key(length), priority=req.spec.priority)

    def release(self, req: Req, *, publish_len: int | None) -> None:
        """Give back row, lock and private pages; the first `publish_len` tokens go to the tree first (None = nothing does)."""
        if req.kv.row is None:
            return
        if publish_len is None:
            self.cache.release(req.kv)
        else:
            self.cache.cache_finished_req(req.kv, req.key(publish_len), prompt_len=req.prompt_len, priority=req.spec.priority)

    def slots(self, row: int, start: int, stop: int) -> IntArray:
        """[stop - start] slots of positions [start, stop) of one row."""
        positions = np.arange(start, stop, dtype=np.int32)
        return self.slots_at(np.full(stop - start, row, dtype=np.int32), positions)

    def slots_at(self, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> IntArray:
        """[n] slots of position positions[i] of row rows[i]."""
        pages = self.req_to_token.table[rows, positions // self.page_size]
        slots: IntArray = (pages * self.page_size + positions % self.page_size).astype(np.int32)
        return slots

    def take_deltas(self) -> tuple[PageDelta, ...]:
        return self.req_to_token.take_deltas()

    def available_without(self, reqs: Sequence[Req]) -> int:
        """Pages that would be free or evictable if these requests were released. Changes nothing."""
        private = 0
        for req in reqs:
            kv = req.kv
            private += ceil_pages(kv.kv_allocated_len, self.page_size) - kv.cache_protected_len // self.page_size
            if kv.lock is not None:
                self.cache.dec_lock_ref(kv.lock)
        pages = self.cache.available_pages + private
        for req in reqs:
            if req.kv.lock is not None:
                req.kv.lock = self.cache.inc_lock_ref(req.kv.lock.node)
        return pages

    def publish_events(self) -> None:
        """Tell what came and went since the last call."""
        if self._recorder is not None and self._sink is not None:
            batch = self._recorder.take()
            if batch is not None:
                self._sink.publish(batch)

    def event_stats(self) -> dict[str, int]:
        return {} if self._sink is None else self._sink.stats()

    def ledger(self) -> dict[str, int]:
        """Pages by owner, each counted by itself; they add up to the pool (I1), or `leaked` says by how many they miss it."""
        return self.cache.keeper.ledger(self.cache.full.name).dump()
