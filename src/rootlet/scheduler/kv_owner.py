"""Who holds which KV: the only place of the scheduler that talks to the cache and the page table (the owner of both is their own room).

Pages of the whole prompt are taken at admission, so a chunk never runs short half-way; decoding takes a page when it crosses a page edge. Models
with windows take window pages chunk by chunk, and give back what no later token reads before each step; models with states hold one working
state for each running request, and keep a copy of it where a chunk ends on the grid.
Freed rows and pages may be handed out at once: executors run plans in order and page tables change only with the plans, so whoever gets them
next is ordered after the last plan that named them (architecture D2; scheduler.md 3.1, O6, O7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootlet.cache.events import AllBlocksCleared, EventRecorder, EventSink
from rootlet.cache.registry import build_cache
from rootlet.cache.types import EvictReason, MatchResult, RadixKey, ReqKvInfo, TreeLock
from rootlet.config.schema import CacheArgs
from rootlet.core.step import Capacity
from rootlet.scheduler.budget import Room, ceil_pages
from rootlet.scheduler.req import Req
from rootlet.scheduler.rooms import Rooms


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
        self._window, self._states = self.cache.window, self.cache.states
        self.rooms = Rooms(self.cache)

    def ledger(self) -> dict[str, int]:
        """Pages by owner, each counted by itself; they add up to the pool (I1), or `leaked` says by how many they miss it."""
        return self.cache.keeper.ledger(self.cache.full.name).dump()

    def publish_events(self) -> None:
        """Tell what came and went since the last call."""
        if self._recorder is not None and self._sink is not None:
            batch = self._recorder.take()
            if batch is not None:
                self._sink.publish(batch)

    def event_stats(self) -> dict[str, int]:
        return {} if self._sink is None else self._sink.stats()

    # ---- admission ---------------------------------------------------------------------------------------------------------------------

    def probe(self, req: Req) -> int:
        """Tokens that a match would give now; touches nothing."""
        length, req.probed = self.cache.core.match_len(req.key(req.num_tokens, limit=req.match_limit()), req.probed)
        return length

    def match(self, req: Req) -> LockedMatch:
        """Longest cached prefix, locked. Caller must `admit` or `unlock` it."""
        return self.lock_prefix(req.key(req.num_tokens, limit=0 if req.cold else req.match_limit()))

    def lock_prefix(self, key: RadixKey) -> LockedMatch:
        """As `match`, for a prefix that is no request's."""
        match = self.cache.match_prefix(key)
        return LockedMatch(match, self.cache.inc_lock_ref(match.last_device_node))

    def unlock(self, locked: LockedMatch) -> None:
        self.cache.dec_lock_ref(locked.lock)

    def admit(self, req: Req, locked: LockedMatch) -> None:
        """Give `req` a row: the matched pages (borrowed, the lock becomes the request's), fresh ones up to `req.num_tokens`, and a state."""
        assert req.kv.row is None, f"I3 {req.rid} already holds row {req.kv.row}"
        row = self.req_to_token.alloc_row()
        assert row is not None, "admission counted rows wrongly"
        kv, prefix_pages = req.kv, locked.prefix_len // self.page_size
        kv.row, kv.lock = row, locked.lock
        # cache_inserted_len stays 0: the first insert counts this request's use of the matched nodes too (lfu, slru).
        kv.cache_protected_len = kv.kv_committed_len = kv.kv_allocated_len = locked.prefix_len
        if prefix_pages:
            self.req_to_token.write(row, 0, locked.match.pages)
        if self._window is not None:
            self._window.open(kv, locked.match.window_pages)
        if self._states is not None:
            opened = self._states.open(kv, locked.lock.node)
            assert opened, "admission promised a state slot, and there is none"
            self._let_state_go(kv)
        self._take(kv, ceil_pages(req.num_tokens, self.page_size) - prefix_pages, EvictReason.ADMISSION)
        kv.kv_allocated_len = req.num_tokens

    def _let_state_go(self, kv: ReqKvInfo) -> None:
        """The request goes on with a copy: the tree's state under its lock may be evicted."""
        if self._states is not None and kv.lock is not None:
            self._states.component.let_go(kv.lock)

    def _take(self, kv: ReqKvInfo, num_pages: int, reason: EvictReason) -> None:
        if num_pages <= 0:
            return
        pages = self.cache.alloc_pages(num_pages, reason=reason)
        assert pages is not None, f"admission promised {num_pages} pages, the pool has {self.cache.available_pages}"
        assert kv.row is not None
        self.req_to_token.write(kv.row, ceil_pages(kv.kv_allocated_len, self.page_size), pages)

    # ---- each step ---------------------------------------------------------------------------------------------------------------------

    def slide(self, req: Req) -> None:
        """Before the positions from `req.planned` on are planned: give back the window pages that none of them reads."""
        if self._window is not None:
            self._window.slide(req.kv, req.planned + 1)
            self._window.let_go(req.kv)

    def window_pages_for(self, req: Req, stop: int) -> int:
        """Window pages that are missing for positions up to `stop`."""
        return 0 if self._window is None else self._window.pages_for(req.kv, stop)

    def grow_window(self, req: Req, stop: int) -> None:
        """Take them; the caller has counted."""
        if self._window is not None:
            grown = self._window.grow(req.kv, stop, EvictReason.GROWTH)
            assert grown, f"window pages of {req.rid} up to {stop} were counted and are not there"

    def pages_for_next(self, req: Req) -> int:
        """Pages that the next decode step of `req` needs (0 or 1); KV length decides, not token length."""
        size = self.page_size  # written out: once a row and step
        return -(-(req.planned + 1) // size) - -(-req.kv.kv_allocated_len // size)

    def ensure_next(self, reqs: Sequence[Req]) -> Room | None:
        """Make room for one more token of each; windows slide first. What they need, or None, with nothing evicted, when it is not there."""
        pages = sum(self.pages_for_next(r) for r in reqs)
        if self._window is None:
            return Room(pages, 0, 0) if self.cache.ensure_pages(pages, reason=EvictReason.GROWTH) else None
        entering = [req for req in reqs if self._window.pages_for(req.kv, req.planned + 1)]  # a window moves on by whole pages
        for req in entering:
            self.slide(req)
        window_pages = len(entering)
        name, keeper = self._window.component.name, self.cache.keeper
        if window_pages > keeper.available(name) or not self.cache.ensure_pages(pages, reason=EvictReason.GROWTH):
            return None
        keeper.ensure(name, window_pages, EvictReason.GROWTH)
        return Room(pages, window_pages, 0)

    def grow(self, req: Req) -> None:
        """Make room for the token at `req.planned`; the caller has ensured the page."""
        kv, end = req.kv, req.planned + 1
        if end > kv.kv_allocated_len:
            self._take(kv, self.pages_for_next(req), EvictReason.GROWTH)
            kv.kv_allocated_len = end
        if self._window is not None:
            self.grow_window(req, end)

    def snapshot(self, req: Req) -> None:
        """A chunk ends at `req.planned`, in a plan that is made: keep a copy of the state there, if it can be shared and a slot can be had."""
        if self._states is not None and self.enabled and not req.cold:
            self._states.snapshot(req.kv)

    def checkpoint(self, req: Req, length: int) -> None:
        """Publish the first `length` tokens (their step has run) while the request goes on; whole pages only, with states up to the last one."""
        if req.cold or not self.enabled:
            self.slide(req)
            return
        self.cache.cache_unfinished_req(req.kv, req.key(length), priority=req.spec.priority)
        self._let_state_go(req.kv)

    def release(self, req: Req, *, publish_len: int | None) -> None:
        """Give back row, lock and private pages; the first `publish_len` tokens go to the tree first (None = nothing does)."""
        if req.kv.row is None:
            return
        if publish_len is None:
            self.cache.release(req.kv)
        else:
            self.cache.cache_finished_req(req.kv, req.key(publish_len), prompt_len=req.prompt_len, priority=req.spec.priority)
