"""The laws of the scheduler, I1..I10 of docs/invariants.md, as functions over its state. Each message starts with the id of the law.

`check_cheap` runs after every tick, O(running); `check_all` only with `Scheduler(check=True)`, O(pool + tree). They read everything, change nothing.
The laws of the cache itself (conservation page by page, locks of nodes) are recomputed by `UnifiedRadixCache.check` and reported as I1, I2.
I7 is asserted where outputs are made (output.py) and I9 again where tokens arrive (commit.py).
"""

from __future__ import annotations

import numpy as np

from rootlet.core.step import StepPlan
from rootlet.core.types import Phase
from rootlet.scheduler.budget import pages_to_finish
from rootlet.scheduler.plan_memory import slots_at
from rootlet.scheduler.state import SchedulerState


def check_cheap(state: SchedulerState) -> None:
    """What costs O(running)."""
    queues = state.queues
    in_containers = queues.num_queued + queues.num_running
    assert in_containers == len(queues.by_rid), f"I3 {in_containers} requests in containers, {len(queues.by_rid)} in the table"
    check_i4_counts(state)
    check_i5_pending(state)
    check_i9_limits(state)
    check_i10_idle(state)


def check_all(state: SchedulerState) -> None:
    check_cheap(state)
    check_i3_containers(state)
    check_i9_pool(state)
    check_i1_pages_i2_locks(state)


def check_i1_pages_i2_locks(state: SchedulerState) -> None:
    """I1: free + tree + private = total, page by page; no page has two owners. I2: locks of a node = live holders below it.

    The cache recomputes both; laws whose id starts with L are about locks.
    """
    try:
        state.kv.cache.check([req.kv for req in state.queues.by_rid.values()], locks=state.pins.locks())
    except AssertionError as error:
        raise AssertionError(f"{'I2' if str(error).startswith('L') else 'I1'} {error}") from error


def check_i3_containers(state: SchedulerState) -> None:
    """Each rid in exactly one container, that of its phase; rows in use = requests that hold one."""
    queues = state.queues
    seen: dict[str, Phase] = {}
    for phase in (Phase.GATED, Phase.WAITING, Phase.PREFILL, Phase.DECODE):
        for req in queues.container(phase):
            assert req.rid not in seen, f"I3 {req.rid} is in {seen[req.rid]} and in {phase}"
            seen[req.rid] = phase
            assert req.phase is phase, f"I3 {req.rid} is in {phase}, its phase is {req.phase}"
            assert queues.by_rid.get(req.rid) is req, f"I3 {req.rid} in {phase} is not the one of the table"
            assert (req.kv.row is not None) == (phase in (Phase.PREFILL, Phase.DECODE)), f"I3 {req.rid} in {phase} holds row {req.kv.row}"
            holds_nothing = req.planned == req.pending == req.pending_chunks == 0
            assert req.kv.row is not None or holds_nothing, f"I3 {req.rid} in {phase} has planned {req.planned}"
    assert len(seen) == len(queues.by_rid), f"I3 in the table and in no container: {sorted(set(queues.by_rid) - set(seen))}"
    rows = [req.kv.row for req in queues.holders()]
    assert len(set(rows)) == len(rows) == state.kv.req_to_token.num_held, f"I3 rows {rows} in use, {state.kv.req_to_token.num_held} held"


def check_i4_counts(state: SchedulerState) -> None:
    """protected <= committed <= allocated, protected page-aligned; planned = prompt + outputs + pending - 1 while decoding."""
    page_size = state.limits.page_size
    for req in state.queues.holders():
        kv, planned, num_tokens = req.kv, req.planned, req.num_tokens
        assert 0 <= kv.cache_protected_len <= kv.kv_committed_len <= kv.kv_allocated_len, f"I4 {req.rid}: {kv}"
        assert kv.cache_protected_len % page_size == 0, f"I4 {req.rid} is protected up to the middle of a page: {kv}"
        assert len(req.tokens) == 4 * num_tokens, f"I4 {req.rid}: {len(req.tokens)} bytes of tokens for {num_tokens}"
        assert planned == kv.kv_committed_len, f"I4 {req.rid}: planned {planned}, committed {kv.kv_committed_len}"
        if req.phase is Phase.PREFILL:
            assert planned < req.fill_len == num_tokens, f"I4 {req.rid}: planned {planned} of {req.fill_len} in prefill"
        elif req.spec.max_new > 0:
            expected = num_tokens + req.pending - 1
            assert planned == expected, f"I4 {req.rid}: planned {planned}, known tokens and pending draws make it {expected}"
        if req.spec.logprobs is not None:
            assert len(req.out.logprobs) == len(req.outputs), f"I4 {req.rid}: {len(req.out.logprobs)} logprobs, {len(req.outputs)} outputs"


def check_i5_pending(state: SchedulerState) -> None:
    """Draws and chunks in flight are those of the launched plans that still count."""
    draws: dict[str, int] = {}
    chunks: dict[str, int] = {}
    for step in state.in_flight:
        for row in step.rows:
            if row.req.phase is not Phase.DONE and row.req.epoch == row.epoch:
                draws[row.req.rid] = draws.get(row.req.rid, 0) + int(row.sample)
                chunks[row.req.rid] = chunks.get(row.req.rid, 0) + int(row.is_extend)
    for req in state.queues.holders():
        rid = req.spec.rid
        assert req.pending == draws.get(rid, 0), f"I5 {rid}: pending {req.pending}, in flight {draws.get(rid, 0)}"
        assert req.pending_chunks == chunks.get(rid, 0), f"I5 {rid}: pending_chunks {req.pending_chunks}, in flight {chunks.get(rid, 0)}"


def check_i6_plan(state: SchedulerState, plan: StepPlan) -> None:
    """Tokens within the step's limit, rows unique, slots unique and of no free page."""
    assert 0 < plan.num_tokens <= state.limits.max_step_tokens, f"I6 plan of {plan.num_tokens} tokens, limit {state.limits.max_step_tokens}"
    assert len(set(plan.pool_rows.tolist())) == plan.num_rows <= state.limits.max_rows, f"I6 rows {plan.pool_rows.tolist()}"
    slots = plan.out_cache_loc.tolist()
    assert len(set(slots)) == len(slots), f"I6 a slot twice: {slots}"
    expected = slots_at(state.kv.cache, np.repeat(plan.pool_rows, plan.extend_lens), plan.positions).tolist()
    assert slots == expected, f"I6 plan {plan.step} writes slots {slots}, its rows and positions name {expected}"
    named = {slot // state.limits.page_size for slot in slots}
    assert 0 not in named, "I6 the padding page is written"
    free = named & set(state.kv.allocator.free_pages().tolist())
    assert not free, f"I6 plan {plan.step} writes free pages {sorted(free)}"
    _check_i6_others(state, plan)


def _check_i6_others(state: SchedulerState, plan: StepPlan) -> None:
    window, states = state.kv.cache.window, state.kv.cache.states
    if window is not None and plan.out_window_loc is not None:
        slots = plan.out_window_loc.tolist()
        assert len(set(slots)) == len(slots), f"I6 a window slot twice: {slots}"
        named = {slot // state.limits.page_size for slot in slots}
        free = named & {0, *window.allocator.pages.free_pages().tolist()}
        assert not free, f"I6 plan {plan.step} writes window pages {sorted(free)}, which are free"
    if states is not None and plan.state_slots is not None:
        held = plan.state_slots.tolist()
        assert len(set(held)) == len(held), f"I6 a state slot twice: {held}"
        free = set(held) & {0, *states.allocator.pool.free_pages().tolist()}
        assert not free, f"I6 plan {plan.step} writes state slots {sorted(free)}, which are free"


def check_i8_progress(state: SchedulerState, plan: StepPlan | None) -> None:
    """Who can run does: with nothing in flight and somebody waiting or running, there is a plan, unless paused."""
    queues = state.queues
    stalled = plan is None and not state.in_flight and not state.paused and (queues.waiting or queues.num_running)
    assert not stalled, f"I8 no plan: {len(queues.waiting)} waiting, {queues.num_running} running, ledger {state.kv.ledger()}"


def check_i9_limits(state: SchedulerState) -> None:
    """max_new and context are never exceeded."""
    limits = state.limits
    max_context_len = limits.max_context_len
    for req in state.queues.holders():
        spec, drawn = req.spec, len(req.outputs) + req.pending
        assert drawn <= spec.max_new, f"I9 {req.rid}: {drawn} draws, max_new is {spec.max_new}"
        assert req.planned <= max_context_len, f"I9 {req.rid}: {req.planned} positions, context is {max_context_len}"


def check_i9_pool(state: SchedulerState) -> None:
    """The pool can hold each request until its end. Nothing of it changes while a request lives: intake asserts it once (`clamp_max_new`)."""
    limits = state.limits
    for req in state.queues.by_rid.values():
        assert pages_to_finish(req.prompt_len, req.spec.max_new, limits.page_size) <= limits.num_pages, f"I9 {req.rid} can never finish in this pool"


def check_i10_idle(state: SchedulerState) -> None:
    """Nobody here: every page is free or evictable, or pinned; every row is free."""
    if len(state.queues):
        return
    cache = state.kv.cache
    assert cache.protected_pages == 0 or len(state.pins), f"I10 idle, {cache.protected_pages} pages are protected"
    assert cache.available_pages + cache.protected_pages == state.kv.num_pages, f"I10 idle, {state.kv.ledger()}"
    keeper = cache.keeper
    for component in cache.core.others:
        lost = keeper.pools[component.name].num_pages - keeper.available(component.name) - component.protected
        assert lost == 0, f"I10 idle, {lost} units of {component.name} belong to nobody"
        assert component.protected == 0 or len(state.pins), f"I10 idle, {component.protected} units of {component.name} are held"
    assert state.kv.req_to_token.num_held == 0, f"I10 idle, {state.kv.req_to_token.num_held} rows are held"
