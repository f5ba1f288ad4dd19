"""One pass over the waiting queue: order it, admit while the budget lasts, preempt where that is allowed, and say why it stopped.

The walk is strict: the first request that is refused ends it, so nobody small slips past somebody large for ever. Why it stopped goes to
`state.waits`, once a pass. Decides who; how much each costs is `prefill_adder`, what the rows of the step are is `batch`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rootlet.config.schema import SchedulerArgs
from rootlet.core.types import Phase
from rootlet.scheduler import preemption
from rootlet.scheduler.budget import Room, prefill_budget
from rootlet.scheduler.delay import PrefillDelay
from rootlet.scheduler.policies import LEAVES, POLICIES, PolicyContext, leave_nothing
from rootlet.scheduler.prefill_adder import Admitted, PrefillAdder, Refused
from rootlet.scheduler.req import Req
from rootlet.scheduler.state import SchedulerState, note_admission, retract_req

MEMORY = frozenset({"pages", "window", "states"})
"""Refusals that somebody's end, or retraction, would lift."""


class PrefillPass:
    """Lives as long as the scheduler; `run` once a tick. Raises `BadConfig` for an unknown policy."""

    def __init__(self, state: SchedulerState, args: SchedulerArgs, delay: PrefillDelay) -> None:
        kv = state.kv
        self._state = state
        self._delay = delay
        self._refused: Req | None = None
        self._refused_at = -1
        self._order = POLICIES.get(args.schedule_policy)
        self._leave = LEAVES.get(args.schedule_policy, leave_nothing)
        self._gap = args.preempt_gap if args.schedule_policy in preemption.PREEMPTIVE_POLICIES else -1
        self._context = PolicyContext(
            page_size=kv.page_size,
            cache_enabled=kv.enabled,
            probe=kv.probe,
            aging_len=args.aging,
            prefilled=lambda: state.counters.prefilled_tokens,
            queues=state.queues,
        )

    def run(self) -> tuple[list[Admitted], list[Req]]:
        """The extend rows of the next step, the unfinished chunk first, and the decode rows that ride along. ([], []) when there are none."""
        state, queues = self._state, self._state.queues
        state.waits.reason = ""
        if not queues.prefill and not queues.waiting:
            return [], []
        held = self._delay.all_prefill(queues)
        if held:
            return self._stop("decode-interval", held)
        if not queues.prefill and queues.num_running >= state.limits.max_rows and not self._may_preempt():
            return self._stop("rows", f"rows: needs 1, has 0; --max-running is {state.limits.max_rows}")
        riders, taken = self._mixed_riders()
        budget = prefill_budget(state.limits, queues.holders(), ratio=state.ratio.value, num_mixed=len(riders), mixed=taken)
        adder = PrefillAdder(state.limits, state.kv, queues, budget)
        short = self._continue_chunks(adder)
        if short is not None and not adder.admitted:
            return self._give_way() if self._nothing_else_moves() else self._stop(short.term, short.why())
        if short is None:
            self._admit(adder)
        if not adder.admitted:
            return [], []
        for req in queues.waiting:
            req.times.num_passes += 1
        return adder.admitted, [r for r in riders if r.phase is Phase.DECODE]

    def _continue_chunks(self, adder: PrefillAdder) -> Refused | None:
        """Those half-way go on, in the order of their admission; why one of them could not."""
        refused = None
        for req in list(self._state.queues.prefill):
            verdict = adder.continue_chunk(req, leave_len=self._leave(req, self._context))
            if isinstance(verdict, Refused) and refused is None:
                refused = verdict
        return refused

    def _nothing_else_moves(self) -> bool:
        return not self._state.in_flight and not self._state.queues.decodable()

    def _give_way(self) -> tuple[list[Admitted], list[Req]]:
        """No chunk finds a window page, and nothing that runs will bring one: a pin ends, else the last of them steps back, and the last that is
        left goes on without sharing (`Req.cold`), which always fits."""
        state, chunks = self._state, self._state.queues.prefill
        if not state.pins.yield_oldest():
            chunks[-1].cold = len(chunks) == 1
            retract_req(state, chunks[-1], why="no window page was left for anybody's next chunk")
        return self.run()

    def _admit(self, adder: PrefillAdder) -> None:
        state, queues = self._state, self._state.queues
        held = self._delay.admission(queues)
        if held:
            self._stop("min-free-slots", held)
            return
        for req in self._walk():
            verdict = adder.add_one_req(req)
            while isinstance(verdict, Refused) and self._is_stuck(verdict) and state.pins.yield_oldest():
                verdict = adder.add_one_req(req)
            if isinstance(verdict, Refused) and verdict.term in ("window", "states") and self._is_stuck(verdict):
                req.cold = True  # what it shares leaves it no room: it has the pool to itself then
                verdict = adder.add_one_req(req)
            if isinstance(verdict, Refused) and self._gap >= 0:
                verdict = self._preempt_for(req, adder, verdict)
            if isinstance(verdict, Refused):
                self._refused, self._refused_at = req, queues.waiting_version
                req.times.waited_for(verdict.term, verdict.why())
                self._stop(verdict.term, f"{req.rid}: {verdict.why()}")
                return
            note_admission(state, req, verdict.start)

    def _walk(self) -> Iterator[Req]:
        """The queue in the policy's order. Whom the last pass refused stays the first while nobody joined or left the queue since: sorting a hopeless
        queue again in each decode step would cost more than the step's other work."""
        queues = self._state.queues
        if self._refused is not None and self._refused_at == queues.waiting_version:
            yield self._refused
        yield from self._order(queues.waiting, self._context)

    def _stop(self, reason: str, why: str) -> tuple[list[Admitted], list[Req]]:
        if self._state.queues.waiting:
            self._state.waits.note(self._state.tick, reason, why)
        return [], []

    def note_pause(self) -> None:
        """This tick launches nothing because the scheduler is paused."""
        self._stop("paused", "paused: nothing is launched until the server is told to continue")

    def _is_stuck(self, refused: Refused) -> bool:
        """Nothing runs whose end would bring the missing pages."""
        return refused.term in MEMORY and not self._state.queues.num_running and not self._state.in_flight

    def _may_preempt(self) -> bool:
        return self._gap >= 0 and preemption.is_wanted(self._state.queues, self._gap)

    def _preempt_for(self, req: Req, adder: PrefillAdder, refused: Refused) -> Admitted | Refused:
        """Make room by the fewest less important requests, at once; nobody is touched when that would not do."""
        if refused.term not in ("rows", *MEMORY):
            return refused
        state, ratio = self._state, self._state.ratio.value
        spared = {chunk.req for chunk in adder.admitted}
        able = preemption.candidates(state.queues, req, gap=self._gap, spared=spared)
        victims = preemption.choose(able, lambda some: adder.would_fit(req, without=some, ratio=ratio))
        if not victims:
            return refused
        adder.give_back(victims, ratio=ratio)
        for victim in victims:
            retract_req(state, victim, "preempted", why=f"for {req.rid} of priority {req.spec.priority}, {refused.why()}")
        return adder.add_one_req(req)

    def _mixed_riders(self) -> tuple[list[Req], Room]:
        """Decode rows that share the step with a prefill chunk, and the pages they take. None when that would need a retraction."""
        state = self._state
        riders = state.queues.decodable() if state.limits.mixed else []
        too_many = len(riders) + state.limits.page_size > state.limits.max_step_tokens
        taken = None if too_many or not riders else state.kv.ensure_next(riders)
        return ([], Room(0, 0, 0)) if taken is None else (riders, taken)
