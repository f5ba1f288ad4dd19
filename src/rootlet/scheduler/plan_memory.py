"""What a plan says about memory: which slots its tokens go to, what changed in the page tables, which states its rows work on.

Taken once a plan, in the order of the plans: what the tables and the states were asked for since the last plan travels with this one, and
what is asked for from now on with the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rootlet.cache.unified_radix_cache import UnifiedRadixCache
from rootlet.core.step import IntArray, PageDelta, StateOp
from rootlet.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Fields of a `StepPlan`, by the same names."""

    out_cache_loc: IntArray
    page_deltas: tuple[PageDelta, ...]
    out_window_loc: IntArray | None = None
    window_deltas: tuple[PageDelta, ...] = ()
    state_slots: IntArray | None = None
    state_ops: tuple[StateOp, ...] = ()


def slots_at(cache: UnifiedRadixCache, token_rows: IntArray, positions: IntArray) -> IntArray:
    """[n] slots of position positions[i] of row token_rows[i]."""
    size = np.int32(cache.page_size)
    slots: IntArray = cache.req_to_token.table[token_rows, positions // size] * size + positions % size
    return slots


def memory_of_plan(
    cache: UnifiedRadixCache, reqs: Sequence[Req], *, token_rows: IntArray, positions: IntArray, slots: IntArray | None = None
) -> PlanMemory:
    """`reqs` = the rows of the plan; `token_rows`, `positions`: pool row and position of each token, `slots` where they are known already. What
    was asked for is sent with this."""
    if slots is None:
        slots = slots_at(cache, token_rows, positions)
    deltas, window, states = cache.req_to_token.take_deltas(), cache.window, cache.states
    if window is None and states is None:
        return PlanMemory(slots, deltas)
    at, offset, size = positions // cache.page_size, positions % cache.page_size, np.int32(cache.page_size)
    table = None if window is None else window.allocator.table
    return PlanMemory(
        slots,
        deltas,
        None if table is None else table.cells[token_rows, at] * size + offset,
        () if table is None else table.take_deltas(),
        None if states is None else np.array([req.kv.state_slot for req in reqs], dtype=np.int32),
        () if states is None else states.allocator.take_ops(),
    )
