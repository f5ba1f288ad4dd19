"""What the parts of the scheduler share, and the one way in which a request gives up what it holds.

`release` (through `KvOwner`) serves finish, abort, retract and failure: `end_req` and `retract_req` are its only two callers (architecture D1).
Results of steps that were launched before are recognised by phase and epoch and dropped in commit.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rootlet.core.clock import Clock
from rootlet.core.step import StepPlan
from rootlet.core.types import Finish, Phase
from rootlet.scheduler.budget import Limits, NewTokenRatio
from rootlet.scheduler.counters import Counters
from rootlet.scheduler.decode_run import DecodeRun
from rootlet.scheduler.gates.base import GateKeeper
from rootlet.scheduler.kv_owner import KvOwner
from rootlet.scheduler.output import Outbox
from rootlet.scheduler.pins import Pins
from rootlet.scheduler.policies.fairness import Tenants
from rootlet.scheduler.queue import Queues
from rootlet.scheduler.req import Req
from rootlet.scheduler.timeline import Finished, WaitLog

PLAN_LOG_LEN = 64


class LaunchedRow(msgspec.Struct, frozen=True):
    """One row of a launched plan: [start, stop) of `req` as of `epoch`."""

    req: Req
    epoch: int
    start: int
    stop: int
    is_extend: bool
    sample: bool


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    plan: StepPlan
    rows: tuple[LaunchedRow, ...]


@dataclass(slots=True)
class SchedulerState:
    """One writer: the scheduler's thread."""

    limits: Limits
    clock: Clock
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    kv: KvOwner
    queues: Queues
    gates: GateKeeper
    outbox: Outbox
    counters: Counters
    ratio: NewTokenRatio
    pins: Pins
    tenants: Tenants = field(default_factory=Tenants.empty)
    waits: WaitLog = field(default_factory=WaitLog)
    finished: Finished = field(default_factory=Finished)
    in_flight: deque[LaunchedStep] = field(default_factory=deque)
    decode_run: DecodeRun | None = None
    plan_log: deque[StepPlan] = field(default_factory=lambda: deque(maxlen=PLAN_LOG_LEN))
    tick: int = 0
    step: int = 0
    next_seq: int = 0
    paused: bool = False


def note(state: SchedulerState, req: Req, what: str, **detail: Any) -> None:
    """A turning point in the life of `req`, for its timeline."""
    req.timeline.note(state.tick, state.clock.now(), what, **detail)


def note_queued(state: SchedulerState, req: Req, what: str, **detail: Any) -> None:
    """As `note`; from now on it waits in the queue (or at a gate before it)."""
    note(state, req, what, **detail)
    req.timeline.queued_tick = state.tick


def waits_of(state: SchedulerState, req: Req) -> list[dict[str, Any]]:
    """Why the queue stood still since `req` came into it; [] while it is not there."""
    since = req.timeline.queued_tick
    return [] if since is None else state.waits.between(since, state.tick)


def note_admission(state: SchedulerState, req: Req, cached_len: int) -> None:
    """Hits count once, at the first admission: finding one's own prefix after a retraction is not a hit."""
    plan = {"branch_at": req.branch_at} if req.branch_at else {"cold": True} if req.cold else {}
    note(state, req, "admitted", matched=cached_len, of=req.fill_len, waited=waits_of(state, req), **plan)
    req.timeline.queued_tick = None
    if req.times.admitted_s is None:
        req.times.admitted_s = state.clock.now()
        req.times.cached_len = cached_len
        state.counters.prompt_tokens += req.prompt_len
        state.counters.cached_tokens += cached_len
        req.tenant.served += req.prompt_len - cached_len
    else:
        state.counters.recomputed_tokens += req.fill_len - cached_len


def end_req(state: SchedulerState, req: Req, finish: Finish, *, publish_len: int | None = None) -> None:
    """The request is over: KV, row and lock are given back, the terminal message is queued. In any phase; exactly once."""
    if req.phase is Phase.GATED:
        state.gates.cancel(req)
    state.kv.release(req, publish_len=publish_len)
    state.queues.move(req, Phase.DONE)
    state.tenants.leave(req.tenant)
    still = {"waited": waits_of(state, req)} if req.timeline.queued_tick is not None else {}
    note(state, req, "finished", why=finish.kind.value, outputs=len(req.outputs), **({"code": finish.code} if finish.code else {}), **still)
    state.finished.add(req.rid, req.timeline)
    state.outbox.terminal(req, finish)


def retract_req(state: SchedulerState, req: Req, reason: str = "retracted", *, why: str = "") -> None:
    """Take KV and row away (`reason`: retracted, preempted, paused; `why` in words, for its timeline); the request waits again with its outputs kept,
    and computes prompt + outputs anew (whatever the cache lost)."""
    assert req.phase in (Phase.PREFILL, Phase.DECODE), f"I3 {req.rid} holds nothing to retract"
    state.kv.release(req, publish_len=None)
    req.epoch += 1
    req.planned = req.pending = req.pending_chunks = req.fill_len = 0
    preempted = reason == "preempted"
    req.times.num_retractions += not preempted
    req.times.num_preemptions += preempted
    req.times.waited_for(reason)
    state.counters.retractions += not preempted
    state.counters.preemptions += preempted
    state.queues.move(req, Phase.WAITING)
    note_queued(state, req, reason, outputs=len(req.outputs), **({"why": why} if why else {}))
