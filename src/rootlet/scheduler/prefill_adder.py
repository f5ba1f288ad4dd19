"""`PrefillAdder`: takes waiting requests into the next prefill step while the budget lasts, and says which budget refused.

Budgets (scheduler.md 2.4): rows, pages (free + evictable, read live under a temporary lock on the matched node, because locking moves the prefix
from evictable to protected), prompt tokens of the step, tokens of a chunk. At most one request is left unfinished by a pass; it goes on first in
the next one, is never matched again, and holds all its pages already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootlet.core.types import Phase
from rootlet.scheduler.budget import CLIP_NEW_LEN, Limits, PrefillBudget, ceil_pages, pages_to_finish, reserved_pages
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
    """`term`: rows | pages | input | chunk. `need` and `have` in the term's own unit."""

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

    def continue_chunk(self, req: Req, *, leave_len: int = 0) -> Admitted:
        """The next chunk of a request that is half-way: always possible, since its pages are its own. It leaves `leave_len` tokens of the step to
        others if that still gives it a page."""
        room = min(self._budget.chunk_len, self._budget.step_len)
        if leave_len:
            room = min(room, max(room - leave_len, self._limits.page_size))
        left = req.fill_len - req.planned
        return self._take(req, req.planned + (left if left <= room else self._whole_pages(room)), is_first=False)

    def add_one_req(self, req: Req) -> Admitted | Refused:
        """Admit `req` (locks its prefix, takes its pages, moves it to PREFILL), or say which budget refused and change nothing."""
        budget = self._budget
        refused = self._refused_before_match()
        if refused is not None:
            return refused
        locked = self._kv.match(req)
        fill_len, prefix_len, page = req.num_tokens, locked.prefix_len, self._limits.page_size
        need = self._pages_needed(req, prefix_len)
        have = self._kv.cache.available_pages - budget.reserved_pages
        size = self._chunk_size(fill_len - prefix_len)
        if need > have:
            refused = Refused("pages", need, have, f"{budget.reserved_pages} pages are reserved for what runs")
        elif isinstance(size, Refused):
            refused = size
        if refused is not None or isinstance(size, Refused):
            self._kv.unlock(locked)
            assert refused is not None
            return refused
        self._kv.admit(req, locked)
        req.fill_len, req.planned, req.outputs_at_admission = fill_len, prefix_len, len(req.outputs)
        own_pages = ceil_pages(fill_len, page) - prefix_len // page
        self._queues.move(req, Phase.PREFILL)
        budget.spend(0, reserve_pages=need - own_pages, new_row=True)
        return self._take(req, prefix_len + size, is_first=True)

    def would_fit(self, req: Req, *, without: Sequence[Req], ratio: float) -> bool:
        """Would `add_one_req` admit `req` once these running requests were released? `ratio` = that of the budget. Changes nothing."""
        budget, page = self._budget, self._limits.page_size
        if budget.num_rows + len(without) <= 0 or self._step_is_full() is not None:
            return False
        locked = self._kv.match(req)
        need = self._pages_needed(req, locked.prefix_len)
        reserved = budget.reserved_pages - sum(reserved_pages(r, ratio, page) for r in without)
        fits = need <= self._kv.available_without(without) - reserved and not isinstance(
            self._chunk_size(req.num_tokens - locked.prefix_len), Refused
        )
        self._kv.unlock(locked)
        return fits

    def give_back(self, reqs: Sequence[Req], *, ratio: float) -> None:
        """These running requests are about to be released: their rows and reservations return to the budget."""
        self._budget.num_rows += len(reqs)
        self._budget.reserved_pages -= sum(reserved_pages(r, ratio, self._limits.page_size) for r in reqs)

    def _pages_needed(self, req: Req, prefix_len: int) -> int:
        page = self._limits.page_size
        return pages_to_finish(req.num_tokens, min(req.left_new, CLIP_NEW_LEN), page) - prefix_len // page

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

    def _chunk_size(self, extend_len: int) -> int | Refused:
        """Tokens to compute now: all of them, or whole pages when they do not fit."""
        budget = self._budget
        if self._limits.may_exceed and self.admitted and extend_len > budget.input_len:
            return Refused("input", extend_len, budget.input_len, "--max-prefill")
        room = min(budget.chunk_len, budget.step_len)
        if extend_len <= room:
            return extend_len
        if self._limits.may_exceed and self.admitted:
            return Refused("input", extend_len, room, "the step is full")
        size = self._whole_pages(room)
        return size if size > 0 else Refused("chunk", self._limits.page_size, room, "a chunk is at least one page")

    def _whole_pages(self, length: int) -> int:
        return length // self._limits.page_size * self._limits.page_size

    def _take(self, req: Req, stop: int, *, is_first: bool) -> Admitted:
        chunk = Admitted(req, req.planned, stop, is_first)
        assert chunk.start < stop <= req.fill_len, f"I8 empty chunk of {req.rid}: [{chunk.start}, {stop}) of {req.fill_len}"
        self._budget.spend(stop - chunk.start)
        self.admitted.append(chunk)
        return chunk
