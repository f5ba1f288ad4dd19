"""How much a request needs, how much there is, and what to say when it is not enough. Pure arithmetic in pages and tokens.

One function, `pages_to_finish`, answers "how many pages until this request has ended by length" for the clamp at intake and for the test at
admission, so every request is either refused at the door or can run (architecture D1; scheduler.md 2.4, failures A3, F4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rootlet.config.schema import SchedulerArgs
from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity
from rootlet.scheduler.req import Req

CLIP_NEW_LEN = 4096
"""Most output tokens that admission reserves for one request: an estimate, never a limit."""

ENDLESS = 1 << 40
"""More than any pool holds."""

RATIO_START, RATIO_FLOOR, RATIO_DECAY_STEPS, RETRACT_HEADROOM = 0.7, 0.14, 600, 20


def ceil_pages(length: int, page_size: int) -> int:
    return -(-length // page_size)


def pages_to_finish(known_len: int, new_len: int, page_size: int) -> int:
    """Pages that hold a request of `known_len` tokens until it has drawn `new_len` more; the last token drawn is never written."""
    return ceil_pages(known_len + max(new_len - 1, 0), page_size)


@dataclass(frozen=True, slots=True)
class Room:
    """So much of each kind of memory: KV pages, window pages, state slots. What a model does not have there is no end of."""

    pages: int
    window_pages: int = ENDLESS
    states: int = ENDLESS


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacity and knobs, resolved once. `chunk_len`: most tokens of one chunk; `may_exceed`: chunking off, a lone prompt may exceed max_prefill.

    `window_peak`: window pages that a request needs at once however long it is, that is one window and the page that is being written (0 = the
    model has no windows). `state_grid`: states can be kept at multiples of so many tokens (0 = no states).
    """

    num_pages: int
    page_size: int
    max_rows: int
    max_context_len: int
    max_step_tokens: int
    chunk_len: int
    input_len: int
    may_exceed: bool
    mixed: bool
    window_peak: int = 0
    num_states: int = 0
    state_grid: int = 0

    @property
    def pool_len(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_prompt_len(self) -> int:
        return min(self.max_context_len - 1, self.pool_len)

    def clamp_max_new(self, prompt_len: int, wanted: int | None) -> int:
        """What context and pool leave of `wanted` (None = all), so that `pages_to_finish` always fits the pool. prompt_len <= max_prompt_len."""
        room = min(self.max_context_len - prompt_len, self.pool_len - prompt_len + 1)
        new_len = room if wanted is None else min(wanted, room)
        assert pages_to_finish(prompt_len, new_len, self.page_size) <= self.num_pages
        return new_len


def limits_of(capacity: Capacity, args: SchedulerArgs) -> Limits:
    """Raises `BadConfig` when no prompt could ever be scheduled."""
    p = capacity.page_size
    chunk = args.chunked_prefill or capacity.max_step_tokens
    if chunk < p:
        raise BadConfig(f"--chunked-prefill {chunk} is less than --page-size {p}: chunks end on page edges, so no prompt could be scheduled")
    if capacity.max_step_tokens < p:
        better = "raise --max-prefill or --chunked-prefill, or lower --page-size"
        raise BadConfig(f"a step holds {capacity.max_step_tokens} tokens, less than --page-size {p}: {better}")
    return Limits(
        num_pages=capacity.num_pages,
        page_size=p,
        max_rows=min(args.max_running, capacity.max_rows, capacity.max_step_tokens),
        max_context_len=capacity.max_context_len,
        max_step_tokens=capacity.max_step_tokens,
        chunk_len=min(chunk, capacity.max_step_tokens),
        input_len=max(min(args.max_prefill, capacity.max_step_tokens), p),
        may_exceed=args.chunked_prefill == 0,
        mixed=args.mixed_chunk,
        window_peak=ceil_pages(capacity.window_len, p) + 1 if capacity.window_len else 0,
        num_states=capacity.num_states,
        state_grid=capacity.state_grid if capacity.num_states else 0,
    )


class NewTokenRatio:
    """Share of the possible output that is reserved for running requests: falls while decoding goes well, rises after a retraction."""

    def __init__(self, conservativeness: float) -> None:
        self._start = min(RATIO_START * conservativeness, 1.0)
        self._floor = RATIO_FLOOR * self._start
        self.value = self._start

    def decay(self) -> None:
        self.value = max(self._floor, self.value - (self._start - self._floor) / RATIO_DECAY_STEPS)

    def reset(self) -> None:
        self.value = self._start

    def after_retraction(self, survivors: Iterable[Req]) -> None:
        drawn = total = count = 0
        for req in survivors:
            drawn += len(req.outputs)
            total += req.spec.max_new
            count += 1
        self.value = min(1.0, (drawn + RETRACT_HEADROOM * count) / (total + 1))


def reserved_pages(req: Req, ratio: float, page_size: int) -> int:
    """Pages that a request which already holds KV is expected to take in addition."""
    left = min(max(req.left_new, 0), CLIP_NEW_LEN)
    expected = int(left * ratio)
    if expected == 0:
        return 0
    return pages_to_finish(req.num_tokens + req.pending, expected, page_size) - ceil_pages(req.kv.kv_allocated_len, page_size)


def own_window_pages(req: Req, page_size: int) -> int:
    """Window pages that the request holds itself, beside those it borrows from the tree."""
    kv = req.kv
    return ceil_pages(kv.window_allocated_len, page_size) - max(kv.cache_protected_len, kv.window_released_len) // page_size


def reserved_window_pages(req: Req, ratio: float, limits: Limits) -> int:
    """As `reserved_pages`, for window pages: never more than one request needs at once, since windows slide."""
    if not limits.window_peak:
        return 0
    expected = int(min(max(req.left_new, 0), CLIP_NEW_LEN) * ratio)
    whole = pages_to_finish(req.num_tokens + req.pending, expected, limits.page_size)
    return max(min(whole, limits.window_peak) - max(own_window_pages(req, limits.page_size), 0), 0)


@dataclass(slots=True)
class PrefillBudget:
    """What one prefill pass may still spend. Pages are compared with the live count of free and evictable ones. Of the reserved window pages,
    `mixed_window_pages` are taken in this very step."""

    num_rows: int
    reserved_pages: int
    input_len: int
    chunk_len: int
    step_len: int
    reserved_window_pages: int = 0
    mixed_window_pages: int = 0

    def spend(self, num_tokens: int, *, reserve_pages: int = 0, new_row: bool = False) -> None:
        self.num_rows -= int(new_row)
        self.reserved_pages += reserve_pages
        self.input_len -= num_tokens
        self.chunk_len -= num_tokens
        self.step_len -= num_tokens


def prefill_budget(limits: Limits, holders: Iterable[Req], *, ratio: float, num_mixed: int, mixed: Room) -> PrefillBudget:
    """The budget at the start of a pass. `num_mixed` decode rows ride along and take `mixed` new pages.

    Mixed rows never shrink a chunk below one page: else a long prompt would wait for all decoding to end.
    """
    held = list(holders)
    reserved = sum(reserved_pages(r, ratio, limits.page_size) for r in held)
    return PrefillBudget(
        num_rows=limits.max_rows - len(held),
        reserved_pages=reserved + mixed.pages,
        input_len=max(limits.input_len - num_mixed, limits.page_size),
        chunk_len=max(limits.chunk_len - num_mixed, limits.page_size),
        step_len=limits.max_step_tokens - num_mixed,
        reserved_window_pages=sum(reserved_window_pages(r, ratio, limits) for r in held) + mixed.window_pages if limits.window_peak else 0,
        mixed_window_pages=mixed.window_pages if limits.window_peak else 0,
    )
