"""`PrefillAdder`: takes waiting requests into the next prefill step while the budget lasts, and says which budget refused.

Budgets (scheduler.md 2.4): rows, pages, window pages and state slots (free + evictable, read live under a temporary lock on the matched node,
because locking moves the prefix from evictable to protected), prompt tokens of the step, tokens of a chunk. A request that is left unfinished
goes on first in the next pass, is never matched again, and holds all its pages already; window pages it takes chunk by chunk.

Where a chunk ends: at the end of the prompt; else on a page edge, with states on the grid where one is in reach. It also ends where the cached
prefix of others parts from it without a window or a state to go on from (`branch_at`), and at the last grid point of the prompt, since what can
be shared of a state is what was copied between two steps. Without windows and states at most one request is left unfinished by a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from rootlet.core.types import Phase
from rootlet.scheduler.budget import (
    CLIP_NEW_LEN,
    Limits,
    PrefillBudget,
    Room,
    ceil_pages,
    pages_to_finish,
    reserved_pages,
    reserved_window_pages,
)
from rootlet.scheduler.kv_owner import KvOwner
from rootlet.scheduler.queue import Queues
from rootlet.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class Admitted:
    """[start, stop) of `req` is computed in this step; `is_first`: the row is new to the executor."""

    req: Req
    start: int
    stop: int
    is_first: bool

    @property
    def is_last(self) -> bool:
        return self.stop == self.req.fill_len


@dataclass(frozen=True, slots=True)
class Refused:
    """`term`: rows | pages | window | states | input | chunk. `need` and `have` in the term's own unit."""

    term: str
    need: int
    have: int
    detail: str = ""

    def why(self) -> str:
        """One line for people: the budget that refused, and its numbers."""
        return f"{self.term}: needs {self.need}, has {self.have}{'; ' + self.detail if self.detail else ''}"


class PrefillAdder:
    """One pass. `admitted` = the extend rows of the step, in order."""

    def __init__(self, limits: Limits, kv: KvOwner, queues: Queues, budget: PrefillBudget) -> None:
        self._limits = limits
        self._kv = kv
        self._queues = queues
        self._budget = budget
        self.admitted: list[Admitted] = []

    def continue_chunk(self, req: Req, *, leave_len: int = 0) -> Admitted | Refused:
        """The next chunk of a request that is half-way. Its pages are its own, so only the step's tokens or a lack of window pages can refuse it.
        It leaves `leave_len` tokens of the step to others if that still gives it a page."""
        room = min(self._budget.chunk_len, self._budget.step_len)
        if leave_len:
            room = min(room, max(room - leave_len, self._limits.page_size))
        stop = self._chunk_stop(req.planned, self._target(req, req.planned, req.fill_len), room)
        if stop <= req.planned:
            return Refused("chunk", self._limits.page_size, room, "a chunk is at least one page")
        self._kv.slide(req)
        own = reserved_window_pages(req, 1.0, self._limits)
        free = self._kv.rooms.now().window_pages - self._budget.mixed_window_pages
        have = max(free - max(self._budget.reserved_window_pages - own, 0), min(free, 1))
        stop = self._within_window(
            req.planned, stop, (have + ceil_pages(req.kv.window_allocated_len, self._limits.page_size)) * self._limits.page_size
        )
        if stop <= req.planned:
            return Refused("window", 1, max(free, 0), "window pages for the next chunk")
        return self._take(req, stop, is_first=False)

    def add_one_req(self, req: Req) -> Admitted | Refused:
        """Admit `req` (locks its prefix, takes its pages, moves it to PREFILL), or say which budget refused and change nothing."""
        refused = self._refused_before_match()
        if refused is not None:
            return refused
        locked, budget, page = self._kv.match(req), self._budget, self._limits.page_size
        req.branch_at = locked.match.branch_at or 0
        fill_len, prefix_len = req.num_tokens, locked.prefix_len
        need = self._needed(req, prefix_len)
        have = Room(*(a - b for a, b in zip(astuple(self._kv.rooms.now()), (budget.reserved_pages, budget.reserved_window_pages, 0), strict=True)))
        stop = self._first_stop(req, prefix_len, have)
        refused = self._short(need, have) or (stop if isinstance(stop, Refused) else None)
        if refused is not None or isinstance(stop, Refused):
            self._kv.unlock(locked)
            assert refused is not None
            return refused
        self._kv.admit(req, locked)
        req.fill_len, req.planned, req.outputs_at_admission = fill_len, prefix_len, len(req.outputs)
        own_pages = ceil_pages(fill_len, page) - prefix_len // page
        self._queues.move(req, Phase.PREFILL)
        budget.spend(0, reserve_pages=need.pages - own_pages, new_row=True)
        budget.reserved_window_pages += max(need.window_pages - (ceil_pages(stop, page) - prefix_len // page), 0)
        return self._take(req, stop, is_first=True)

    def would_fit(self, req: Req, *, without: Sequence[Req], ratio: float) -> bool:
        """Would `add_one_req` admit `req` once these running requests were released? `ratio` = that of the budget. Changes nothing."""
        budget, page = self._budget, self._limits.page_size
        if budget.num_rows + len(without) <= 0 or self._step_is_full() is not None:
            return False
        locked = self._kv.match(req)
        room = self._kv.rooms.without(without)
        have = Room(
            room.pages - budget.reserved_pages + sum(reserved_pages(r, ratio, page) for r in without),
            room.window_pages - budget.reserved_window_pages + sum(reserved_window_pages(r, ratio, self._limits) for r in without),
            room.states,
        )
        short = self._short(self._needed(req, locked.prefix_len), have)
        fits = short is None and not isinstance(self._first_stop(req, locked.prefix_len, have), Refused)
        self._kv.unlock(locked)
        return fits

    def give_back(self, reqs: Sequence[Req], *, ratio: float) -> None:
        """These running requests are about to be released: their rows and reservations return to the budget."""
        self._budget.num_rows += len(reqs)
        self._budget.reserved_pages -= sum(reserved_pages(r, ratio, self._limits.page_size) for r in reqs)
        self._budget.reserved_window_pages -= sum(reserved_window_pages(r, ratio, self._limits) for r in reqs)

    def _needed(self, req: Req, prefix_len: int) -> Room:
        """What `req` needs of each kind until it has ended by length, beyond what it borrows."""
        page, limits = self._limits.page_size, self._limits
        pages = pages_to_finish(req.num_tokens, min(req.left_new, CLIP_NEW_LEN), page) - prefix_len // page
        return Room(pages, min(pages, limits.window_peak), int(limits.num_states > 0))

    def _short(self, need: Room, have: Room) -> Refused | None:
        """The kind of memory that refuses, with its numbers."""
        budget, limits = self._budget, self._limits
        if need.pages > have.pages:
            return Refused("pages", need.pages, have.pages, f"{budget.reserved_pages} pages are reserved for what runs")
        if need.window_pages > have.window_pages:
            reserved = f"{budget.reserved_window_pages} window pages are reserved for what runs"
            return Refused("window", need.window_pages, have.window_pages, reserved)
        if need.states > have.states:
            return Refused("states", need.states, have.states, f"{limits.num_states} state slots, one for each running request; the others are held")
        return None

    def _refused_before_match(self) -> Refused | None:
        budget = self._budget
        if budget.num_rows <= 0:
            return Refused("rows", 1, 0, f"--max-running is {self._limits.max_rows}")
        return self._step_is_full()

    def _step_is_full(self) -> Refused | None:
        budget = self._budget
        if self.admitted and budget.input_len <= 0:
            return Refused("input", 1, budget.input_len, "--max-prefill tokens are in this step")
        if budget.chunk_len <= 0 or budget.step_len <= 0:
            return Refused("chunk", 1, min(budget.chunk_len, budget.step_len), "--chunked-prefill tokens are in this step")
        return None

    def _first_stop(self, req: Req, prefix_len: int, have: Room) -> int | Refused:
        """Where the first chunk of `req` ends: as far as the step's tokens and the window pages go."""
        budget, page = self._budget, self._limits.page_size
        target = self._target(req, prefix_len, req.num_tokens)
        extend_len, room = target - prefix_len, min(budget.chunk_len, budget.step_len)
        if self._limits.may_exceed and self.admitted and extend_len > min(budget.input_len, room):
            return Refused("input", extend_len, min(budget.input_len, room), "--max-prefill")
        stop = self._chunk_stop(prefix_len, target, room)
        if stop <= prefix_len:
            return Refused("chunk", page, room, "a chunk is at least one page")
        return self._within_window(prefix_len, stop, prefix_len + max(have.window_pages, 1) * page)

    def _target(self, req: Req, start: int, fill_len: int) -> int:
        """The next position after `start` that a chunk must end at, however much room there is."""
        grid = self._limits.state_grid
        stops = (req.branch_at, fill_len // grid * grid if grid else 0)
        return min((stop for stop in stops if start < stop < fill_len), default=fill_len)

    def _chunk_stop(self, start: int, target: int, room: int) -> int:
        """`target`, or as far as `room` tokens go: a grid point if there is one, else a page edge; `start` when not even that."""
        if target - start <= room:
            return target
        grid = self._limits.state_grid
        on_grid = (start + room) // grid * grid if grid else 0
        return on_grid if on_grid > start else start + room // self._limits.page_size * self._limits.page_size

    def _within_window(self, start: int, stop: int, limit: int) -> int:
        """`stop`, or an earlier page edge when the window pages end at `limit`."""
        return stop if not self._limits.window_peak or stop <= limit else max(limit // self._limits.page_size * self._limits.page_size, start)

    def _take(self, req: Req, stop: int, *, is_first: bool) -> Admitted:
        chunk = Admitted(req, req.planned, stop, is_first)
        assert chunk.start < stop <= req.fill_len, f"I8 empty chunk of {req.rid}: [{chunk.start}, {stop}) of {req.fill_len}"
        taken = self._kv.window_pages_for(req, stop)
        self._kv.grow_window(req, stop)
        if not is_first:
            self._budget.reserved_window_pages = max(self._budget.reserved_window_pages - taken, 0)
        self._budget.spend(stop - chunk.start)
        self.admitted.append(chunk)
        return chunk
