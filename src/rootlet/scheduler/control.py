"""Everything that is not generation: aborts, time limits, pause, flush, state dumps, health, drain.

Time enters here only, through the injected clock. Answers go to the frontend; terminal messages of requests go the usual way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootlet.config.schema import SchedulerArgs
from rootlet.core.step import ControlOp, Executor, StepPlan
from rootlet.core.types import Finish, FinishKind, Phase
from rootlet.ipc.messages import (
    HEALTH_PERIOD_S,
    AbortReq,
    FlushCacheReq,
    FlushCacheReqOutput,
    GetStateReq,
    GetStateReqOutput,
    HealthTick,
    PauseReq,
    PinReq,
    ShutdownReq,
)
from rootlet.scheduler.pause import pause
from rootlet.scheduler.req import Req
from rootlet.scheduler.state import SchedulerState, end_req, note_queued, waits_of

GATE_POLL_S = 0.005
IDLE_WAIT_S = 1.0
COMPACT_LEN = 256


@dataclass(frozen=True, slots=True)
class _Limit:
    """A time limit of one request: `queue` limits end it only while it was never admitted."""

    req: Req
    queue: bool
    knob: str
    seconds: float


class Deadlines:
    """A heap of time limits. Those of requests that ended are dropped when they come due, or when they are most of the heap."""

    def __init__(self, args: SchedulerArgs) -> None:
        self._args = args
        self._heap: list[tuple[float, int, _Limit]] = []
        self._count = 0
        self._compact_at = COMPACT_LEN

    def watch(self, req: Req, deadline_s: float | None) -> None:
        """Start the clock of a request. `deadline_s` = its own limit, seconds from arrival, None = none besides the knobs."""
        args = self._args
        limits = (
            (args.queue_timeout, True, "--queue-timeout"),
            (args.request_timeout, False, "--request-timeout"),
            (deadline_s, False, "its deadline"),
        )
        for seconds, queue, knob in limits:
            if seconds is not None:
                self._count += 1
                heapq.heappush(self._heap, (req.times.arrival_s + seconds, self._count, _Limit(req, queue, knob, seconds)))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].req.phase is not Phase.DONE]
            heapq.heapify(self._heap)
            self._compact_at = max(2 * len(self._heap), COMPACT_LEN)

    def due(self, now_s: float) -> list[tuple[Req, Finish]]:
        """Requests whose time is up, once each, in order of their limits."""
        ended: dict[str, tuple[Req, Finish]] = {}
        while self._heap and self._heap[0][0] <= now_s:
            limit = heapq.heappop(self._heap)[2]
            req = limit.req
            if req.phase is Phase.DONE or (limit.queue and req.times.admitted_s is not None):
                continue
            what = "waited in the queue" if req.times.admitted_s is None else "ran"
            message = f"The request {what} longer than {limit.knob} ({limit.seconds:g} s); it had produced {len(req.outputs)} tokens."
            ended.setdefault(req.rid, (req, Finish(FinishKind.ERROR, status=504, code="deadline_exceeded", message=message)))
        return list(ended.values())

    @property
    def pending(self) -> int:
        return len(self._heap)

    def next_s(self) -> float | None:
        """When the next limit of a live request comes due."""
        while self._heap and self._heap[0][2].req.phase is Phase.DONE:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class Control:
    """Handles control messages and what time brings. One instance a scheduler."""

    def __init__(self, state: SchedulerState, *, executor: Executor, args: SchedulerArgs, send: Callable[[Any], None]) -> None:
        self._state = state
        self._executor = executor
        self._args = args
        self._send = send
        self.deadlines = Deadlines(args)
        self._flushes: list[tuple[float, FlushCacheReq]] = []
        self._health_s = state.clock.now()
        self._drain_until_s: float | None = None

    @property
    def draining(self) -> bool:
        return self._drain_until_s is not None

    def abort(self, msg: AbortReq) -> None:
        """In any phase, at once: what is in flight is dropped when its result comes. Exact rid; an unknown one is a no-op."""
        if msg.abort_all:
            for req in self._state.queues.live():
                self._abort_req(req, msg.reason)
        elif msg.rid:
            found = self._state.queues.by_rid.get(msg.rid)
            if found is not None:
                self._abort_req(found, msg.reason)

    def _abort_req(self, req: Req, reason: str) -> None:
        end_req(self._state, req, Finish(FinishKind.ABORT, status=499, code="aborted", message=reason))

    def pause(self, msg: PauseReq) -> None:
        pause(self._state, msg)
        self._send(GetStateReqOutput(msg.req_id, {"paused": msg.paused}))

    def flush(self, msg: FlushCacheReq) -> None:
        self._flushes.append((self._state.clock.now() + msg.timeout_s, msg))

    def get_state(self, msg: GetStateReq) -> None:
        dumps = {"tree": lambda: {"tree": self._state.kv.cache.pretty()}, "info": self.info, "state": self.dump, "metrics": self.metrics}
        if msg.what == "request":
            self._send(GetStateReqOutput(msg.req_id, self.request(str(msg.args.get("rid")))))
            return
        make = dumps.get(msg.what)
        self._send(GetStateReqOutput(msg.req_id, make() if make else {"error": f"unknown state {msg.what!r} (known: {', '.join(dumps)})"}))

    def pin(self, msg: PinReq) -> None:
        self._send(GetStateReqOutput(msg.req_id, self._state.pins.handle(msg, self._state.clock.now())))

    def shutdown(self, msg: ShutdownReq) -> None:
        """From now on new requests are refused; what was accepted may finish until the time is up. A second one can only shorten it."""
        until_s = self._state.clock.now() + msg.drain_s
        self._drain_until_s = until_s if self._drain_until_s is None else min(self._drain_until_s, until_s)

    def on_tick(self) -> None:
        """Time limits, the end of a drain, gates, parked flushes, health."""
        now_s = self._state.clock.now()
        for req, finish in self.deadlines.due(now_s):
            end_req(self._state, req, finish)
        if self._drain_until_s is not None and now_s >= self._drain_until_s:
            message = "The server is shutting down; the request was not finished in time."
            self.end_all(Finish(FinishKind.ERROR, status=503, code="shutting_down", message=message))
        self._state.pins.expire(now_s)
        self._poll_gates()
        self._try_flush(now_s)
        if now_s - self._health_s >= HEALTH_PERIOD_S:
            self._health_s = now_s
            self._send(HealthTick(steps=self._state.step))

    def _poll_gates(self) -> None:
        for req in list(self._state.queues.gated):
            verdict = self._state.gates.poll(req)
            if isinstance(verdict, Finish):
                end_req(self._state, req, verdict)
            elif verdict:
                self._state.queues.move(req, Phase.WAITING)
                note_queued(self._state, req, "gate opened")

    def end_all(self, finish: Finish) -> None:
        """Every live request ends with `finish`."""
        for req in self._state.queues.live():
            end_req(self._state, req, finish)

    def _try_flush(self, now_s: float) -> None:
        if not self._flushes:
            return
        queues = self._state.queues
        idle = not len(queues) and not self._state.in_flight
        if idle:
            self._state.pins.clear()
            assert self._state.kv.cache.flush(), "I10 idle, yet the cache refuses to flush"
            self._executor.control(ControlOp("flush"))
        message = "" if idle else f"busy: {queues.num_running} running, {queues.num_queued} waiting, {len(self._state.in_flight)} steps in flight"
        parked = []
        for until_s, msg in self._flushes:
            if idle or now_s >= until_s:
                self._send(FlushCacheReqOutput(msg.req_id, success=idle, message=message))
            else:
                parked.append((until_s, msg))
        self._flushes = parked

    def wait_s(self) -> float:
        """How long nothing can happen by itself, when there is nothing to do: until the next limit, flush, drain end or health tick."""
        now_s = self._state.clock.now()
        moments = [now_s + IDLE_WAIT_S, self._health_s + HEALTH_PERIOD_S, *(until_s for until_s, _ in self._flushes)]
        moments += [s for s in (self.deadlines.next_s(), self._drain_until_s) if s is not None]
        if self._state.queues.gated and not self._state.paused:
            moments.append(now_s + GATE_POLL_S)
        return max(min(moments) - now_s, 0.0)

    def request(self, rid: str) -> dict[str, Any]:
        """One live or recently finished request with its timeline, under "request"; {} when it is not known."""
        req, ended = self._state.queues.by_rid.get(rid), self._state.finished.get(rid)
        if req is not None:
            return {"request": {"phase": req.phase.value, **req_line(req), **req.timeline.dump(), "waiting_for": waits_of(self._state, req)}}
        return {"request": {"phase": Phase.DONE.value, **ended.dump()}} if ended is not None else {}

    def info(self) -> dict[str, Any]:
        s = self._state
        limits = {name: getattr(s.limits, name) for name in type(s.limits).__dataclass_fields__}
        return {"limits": limits, "policy": self._args.schedule_policy, "steps": s.step, "paused": s.paused, "draining": self.draining}

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, gauges and cache sizes of now, histograms; the snapshot that `/metrics` is made of."""
        s = self._state
        gauges = {
            "running": s.queues.num_running,
            "prefill": len(s.queues.prefill),
            "decode": len(s.queues.decode),
            "waiting": len(s.queues.waiting),
            "gated": len(s.queues.gated),
            "pins": len(s.pins),
            "in_flight": len(s.in_flight),
            "new_token_ratio": s.ratio.value,
            **{f"kv_{owner}_pages": n for owner, n in s.kv.ledger().items()},
        }
        return {
            "counters": s.counters.numbers(),
            "gauges": gauges,
            "queue": self.queue_by_reason(),
            "histograms": s.counters.histograms(),
            "cache": dict(s.kv.cache.stats()),
            "kv_events": s.kv.event_stats(),
        }

    def queue_by_reason(self) -> dict[str, int]:
        """Waiting requests by what holds the head of the queue back, and those at gates; "" never stands here."""
        s = self._state
        reasons = {"gate": len(s.queues.gated), s.waits.reason or "next_pass": len(s.queues.waiting)}
        return {reason: count for reason, count in reasons.items() if count}

    def dump(self) -> dict[str, Any]:
        """Queues, lengths, ledger, ASCII tree, the last plans: all of it plain values."""
        s = self._state
        return {
            **self.info(),
            "queues": {phase.value: [req_line(r) for r in s.queues.container(phase)] for phase in Phase if phase is not Phase.DONE},
            "ledger": s.kv.ledger(),
            "tenants": s.tenants.served(),
            "tree": s.kv.cache.pretty(),
            "plans": [plan_line(p) for p in s.plan_log],
            "counters": s.counters.numbers(),
        }


def req_line(req: Req) -> dict[str, Any]:
    """One request as plain values. Lengths in tokens."""
    kv = req.kv
    return {
        "rid": req.rid,
        "epoch": req.epoch,
        "prompt_len": req.prompt_len,
        "outputs": len(req.outputs),
        "max_new": req.spec.max_new,
        "planned": req.planned,
        "pending": req.pending,
        "row": kv.row,
        "protected": kv.cache_protected_len,
        "committed": kv.kv_committed_len,
        "allocated": kv.kv_allocated_len,
        "window": [kv.window_released_len, kv.window_allocated_len],
        "states": [slot for slot in (kv.state_slot, *(slot for _, slot in kv.snapshots)) if slot is not None],
        "retractions": req.times.num_retractions,
        "wait_reasons": dict(req.times.wait_reasons),
        "last_why": req.times.last_why,
    }


def plan_line(plan: StepPlan) -> str:
    """One plan as one line; equal plans give equal lines (I11)."""
    ends, marks = plan.seq_lens, ["s" if drawn else "" for drawn in plan.sample]
    rows = [f"{rid}.{plan.epochs[b]}@{plan.pool_rows[b]}[{plan.prefix_lens[b]},{ends[b]}){marks[b]}" for b, rid in enumerate(plan.rids)]
    line = f"{plan.step} {plan.mode.name} {' '.join(rows)} -> {plan.out_cache_loc.tolist()}"
    if plan.out_window_loc is not None:
        line += f" window {plan.out_window_loc.tolist()}"
    if plan.state_slots is not None:
        line += f" states {plan.state_slots.tolist()}" + "".join(f" {op.dst}<-{op.src}" for op in plan.state_ops)
    return line
