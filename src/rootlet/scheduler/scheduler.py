"""`Scheduler`: one tick. Messages come in through `handle`, `get_next_batch_to_run` makes the next plan, `process_batch_result` applies its result.

Integers only: no torch, no sockets, no threads; time, executor and channels are handed in (architecture D1, D15). The loop that calls it is in
loop.py; what it decides is in the files beside this one. Reading order: req, queue, budget, prefill_adder, batch, commit, this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rootlet.cache.events import EventSink
from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import Clock
from rootlet.core.errors import RootletError, Unavailable
from rootlet.core.step import Executor, StepPlan, StepResult
from rootlet.core.types import Finish, FinishKind, ForwardMode, Phase
from rootlet.ipc.messages import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReq,
    GetStateReq,
    PauseReq,
    PinReq,
    SchedulerReady,
    ShutdownReq,
    StopReq,
    TokenizedGenerateReqInput,
    ToTokenizer,
)
from rootlet.scheduler import invariants
from rootlet.scheduler.batch import ScheduleBatch
from rootlet.scheduler.budget import NewTokenRatio, limits_of
from rootlet.scheduler.commit import commit, stop_req
from rootlet.scheduler.control import Control
from rootlet.scheduler.counters import Counters
from rootlet.scheduler.delay import PrefillDelay
from rootlet.scheduler.gates.base import GateKeeper
from rootlet.scheduler.gates.parallel import ParallelGate
from rootlet.scheduler.intake import check_queue, finish_of, make_req
from rootlet.scheduler.kv_owner import KvOwner
from rootlet.scheduler.output import Outbox
from rootlet.scheduler.pins import Pins
from rootlet.scheduler.prefill_pass import PrefillPass
from rootlet.scheduler.queue import Queues
from rootlet.scheduler.req import Req
from rootlet.scheduler.retraction import forced_victim, retract_decode
from rootlet.scheduler.state import SchedulerState, end_req, note_queued, retract_req

SHORT = "memory ran short for the next token of all that decode"


@dataclass(frozen=True, slots=True)
class Sinks:
    """Where what the scheduler says goes. None of them may block or call back. `request_log` takes one plain dict a finished request.
    `kv_events` hears what comes and goes in the prefix cache."""

    to_detokenizer: Callable[[BatchTokenIDOutput], None]
    to_tokenizer: Callable[[ToTokenizer], None]
    request_log: Callable[[dict[str, Any]], None] | None = None
    kv_events: EventSink | None = None


class Scheduler:
    """Owns requests, queues and the running batch; the only caller of the cache. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        *,
        executor: Executor,
        scheduler_args: SchedulerArgs,
        cache_args: CacheArgs,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        sinks: Sinks,
        check: bool = False,
        retract_every: int = 0,
    ) -> None:
        """`check`: recompute every invariant after every tick; `retract_every`: for tests, retract somebody every so many decode steps.

        Raises `BadConfig` for knobs under which no prompt could ever run."""
        self.executor = executor
        self._args = scheduler_args
        self._check = check
        self._retract_every = retract_every
        self._decodes_since_forced = 0
        capacity, counters, queues = executor.capacity, Counters(), Queues()
        kv = KvOwner(capacity, cache_args, events=sinks.kv_events)
        gates = (ParallelGate(queues),) if cache_args.prefix_cache else ()
        self.state = SchedulerState(
            limits=limits_of(capacity, scheduler_args),
            clock=clock,
            eos_token_ids=tuple(eos_token_ids),
            vocab_size=capacity.vocab_size,
            kv=kv,
            pins=Pins(kv),
            queues=queues,
            gates=GateKeeper(gates),
            outbox=Outbox(sinks.to_detokenizer, clock=clock, counters=counters, request_log=sinks.request_log),
            counters=counters,
            ratio=NewTokenRatio(scheduler_args.conservativeness),
        )
        self.control = Control(self.state, executor=executor, args=scheduler_args, send=sinks.to_tokenizer)
        self._delay = PrefillDelay(scheduler_args, max_rows=self.state.limits.max_rows)
        self._prefill = PrefillPass(self.state, scheduler_args, self._delay)

    # ---- what the loop asks ------------------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self.state.in_flight)

    @property
    def idle(self) -> bool:
        """No live request and nothing in flight."""
        return not len(self.state.queues) and not self.state.in_flight

    @property
    def has_work(self) -> bool:
        """A step may be planned or is in flight: the loop must not sleep."""
        queues = self.state.queues
        runnable = bool(queues.waiting or queues.num_running)
        return bool(self.state.in_flight) or (runnable and not self.state.paused)

    @property
    def finished_shutdown(self) -> bool:
        return self.control.draining and self.idle

    def wait_s(self) -> float:
        """How long the loop may block for messages."""
        return 0.0 if self.has_work else self.control.wait_s()

    def ready_message(self) -> SchedulerReady:
        """Capacity and clamps that the frontend validates with. The launcher adds `memory_sum` and `info`."""
        limits = self.state.limits
        return SchedulerReady(
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_rows=limits.max_rows,
            max_context_len=limits.max_context_len,
            max_prompt_len=limits.max_prompt_len,
            vocab_size=self.state.vocab_size,
        )

    # ---- messages and time -------------------------------------------------------------------------------------------------------------

    def handle(self, msg: Any) -> None:
        """Take one message from the frontend or the detokenizer. Nothing a client can put into one raises."""
        match msg:
            case TokenizedGenerateReqInput():
                self._handle_generate(msg)
            case AbortReq():
                self.control.abort(msg)
            case StopReq():
                stop_req(self.state, msg)
            case FlushCacheReq():
                self.control.flush(msg)
            case GetStateReq():
                self.control.get_state(msg)
            case PauseReq():
                self.control.pause(msg)
            case PinReq():
                self.control.pin(msg)
            case ShutdownReq():
                self.control.shutdown(msg)
            case _:
                raise AssertionError(f"a message of type {type(msg).__name__} does not belong to the scheduler")

    def _handle_generate(self, msg: TokenizedGenerateReqInput) -> None:
        state = self.state
        if msg.rid in state.queues.by_rid:
            # A second terminal message would end the first request at its client: the newcomer is dropped, the frontend keeps rids unique.
            state.counters.duplicate_rids += 1
            return
        try:
            if self.control.draining:
                raise Unavailable("The server is shutting down and takes no new requests.", code="shutting_down")
            check_queue(state, self._args.max_queue)
            req = make_req(state, msg)
        except RootletError as error:
            state.outbox.reject(msg.rid, msg.detok, prompt_len=len(msg.input_ids) // 4, finish=finish_of(error))
            return
        state.counters.requests += 1
        if state.gates.begin(req):
            req.phase = Phase.GATED
        state.queues.add(req)
        note_queued(state, req, "queued", gated=req.phase is Phase.GATED)
        self.control.deadlines.watch(req, msg.deadline_s)

    def on_tick(self) -> None:
        """Once a turn of the loop, before planning: time limits, gates, flushes, health. Sends what messages have queued."""
        self.control.on_tick()
        if not len(self.state.queues):
            self.state.ratio.reset()
        self.state.outbox.flush()

    def _end_turn(self) -> None:
        self.state.outbox.flush()
        self.state.kv.publish_events()
        if self._check:
            invariants.check_all(self.state)

    # ---- plan --------------------------------------------------------------------------------------------------------------------------

    def get_next_batch_to_run(self) -> StepPlan | None:
        """The next plan, already counted as in flight: the caller must submit it. Prefill goes before decode. None = nothing to launch now."""
        batch = None
        self.state.tick += 1
        if self.state.paused:
            self._prefill.note_pause()
        else:
            self._force_retraction()
            batch = self.get_new_batch_prefill() or self._update_running_batch()
        plan = None if batch is None else batch.freeze()
        if plan is not None:
            self._delay.launched(prefill=plan.mode is not ForwardMode.DECODE, decode=plan.mode is not ForwardMode.EXTEND)
        self._end_turn()
        if plan is None:
            invariants.check_i8_progress(self.state, plan)
        elif self._check:
            invariants.check_i6_plan(self.state, plan)
        return plan

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """Admit from the waiting queue; the unfinished chunk goes on first. None when nothing could be admitted."""
        chunks, riders = self._prefill.run()
        if not chunks:
            return None
        batch = ScheduleBatch(self.state)
        batch.prepare_for_extend(chunks)
        batch.prepare_for_decode(riders)
        self._decodes_since_forced += bool(riders)
        return batch

    def _update_running_batch(self) -> ScheduleBatch | None:
        """One token for each running request; retract when pages run short."""
        state = self.state
        rows = self.state.queues.decodable()
        if not rows:
            return None
        if state.kv.ensure_next(rows) is None:
            if any(req.ends_in_flight for req in state.queues.decode) or (len(rows) == 1 and state.in_flight):
                return None  # a result in flight certainly frees pages, or is the last word of the only one left
            rows = self._retract(rows)
            if not rows:
                return None if state.in_flight else self.get_new_batch_prefill()
        else:
            state.ratio.decay()
        batch = ScheduleBatch(state)
        batch.prepare_for_decode(rows)
        self._decodes_since_forced += 1
        return batch

    def _retract(self, rows: list[Req]) -> list[Req]:
        """The rows that go on now, their pages ensured."""
        state = self.state
        outcome = retract_decode(rows, fits=lambda keep: state.kv.ensure_next(keep) is not None, retract=lambda r: retract_req(state, r, why=SHORT))
        if outcome.stuck is not None and state.queues.prefill:
            retract_req(state, state.queues.prefill[-1], why=SHORT)  # who has drawn nothing yet gives way, and computes its prompt again
            return self._retract([outcome.stuck])
        if outcome.stuck is not None:
            # It has the pool to itself and still does not fit. Intake's clamp rules this out; the server lives on if it is ever wrong.
            if not state.in_flight and state.pins.yield_oldest():
                return self._retract([outcome.stuck])
            if not state.in_flight and state.limits.window_peak and not outcome.stuck.cold:
                outcome.stuck.cold = True  # what it shares of windows leaves it no room: alone it always fits
                retract_req(state, outcome.stuck, why="what it shares of windows leaves it no room: it goes on without sharing")
            elif not state.in_flight:
                end_req(state, outcome.stuck, Finish(FinishKind.LENGTH), publish_len=outcome.stuck.num_tokens - 1)
            return []
        survivors = self.state.queues.decodable()
        state.ratio.after_retraction(survivors)
        return survivors

    def _force_retraction(self) -> None:
        every = self._retract_every
        victim = forced_victim(self.state.queues.decode) if 0 < every <= self._decodes_since_forced else None
        if victim is not None:
            self._decodes_since_forced = 0
            retract_req(self.state, victim, why="forced, by a test")

    # ---- result ------------------------------------------------------------------------------------------------------------------------

    def process_batch_result(self, result: StepResult) -> None:
        """Apply the result of the oldest plan in flight and send what it gave."""
        commit(self.state, result)
        self._end_turn()
        invariants.check_cheap(self.state)
