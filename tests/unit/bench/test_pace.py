"""The measuring of `make bench-control`: rounds interleave, a table row says what was met, an executor that costs nothing answers rightly."""

from __future__ import annotations

import numpy as np
import pytest

from rootlet.bench.control_ticks import Queue, _decode_ticks
from rootlet.bench.instant import TOKEN, InstantExecutor, request
from rootlet.bench.pace import Operation, Pace, Row, cells, measure, times_us
from rootlet.bench.trace_demo import tells_all
from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import VirtualClock
from rootlet.core.step import Capacity
from rootlet.ipc.messages import BatchTokenIDOutput
from rootlet.scheduler.loop import turn
from rootlet.scheduler.scheduler import Scheduler, Sinks


def test_rounds_interleave_and_the_first_does_not_count() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> list[float]:
        order.append(name)
        return [value]

    pace = Pace()
    row = measure(Operation("x", 2.0, lambda: side("a", 1.0), lambda: side("b", 8.0)), pace, rounds=2)
    assert order == ["a", "a", "b", "a", "b"]
    assert (row.ours_us, row.theirs_us, len(row.pace_us)) == ([1.0, 1.0], [8.0, 8.0], 6)
    assert pace.best_us() == min(row.pace_us)


def test_a_row_says_what_was_met_and_how_disturbed_it_was() -> None:
    missed = Row("x", 2.0, ours_us=[3.0, 3.0, 3.0], theirs_us=[9.0], pace_us=[600.0, 900.0, 800.0])
    assert cells(missed, 400.0) == ("x", "2", "3.0 (3.0)", "MISSED 1.50x", "9.0", "3.0x", "2.00")
    assert missed.is_missed
    assert not Row("z", None, ours_us=[3.0]).is_missed
    assert cells(Row("y", 3.0, ours_us=[3.0, 3.0], pace_us=[1.0]), 1.0)[3:6] == ("met", "", "")


def test_times_are_those_of_the_clock_that_was_given() -> None:
    now = [0.0]

    def work() -> None:
        now[0] += 2.5e-6

    assert times_us(work, 3, clock=lambda: now[0]) == pytest.approx([2.5, 2.5, 2.5])


def test_the_instant_executor_answers_each_row_that_samples() -> None:
    outputs: dict[str, list[int]] = {}

    def collect(batch: BatchTokenIDOutput) -> None:
        for out in batch.outputs:
            outputs.setdefault(out.rid, []).extend(out.token_ids)

    executor = InstantExecutor(Capacity(num_pages=64, page_size=4, max_rows=4, max_context_len=64, max_step_tokens=64, vocab_size=100))
    args = SchedulerArgs(chunked_prefill=8)
    scheduler = Scheduler(
        executor=executor, scheduler_args=args, cache_args=CacheArgs(), eos_token_ids=(), clock=VirtualClock(), sinks=Sinks(collect, lambda m: None)
    )
    messages = [request("long", np.arange(20, 40), 3), request("short", np.arange(3, 6).astype("<i4").tobytes(), 2)]
    while messages or not scheduler.idle:
        turn(scheduler, messages, 1)
        messages = []
    assert outputs == {"long": [TOKEN] * 3, "short": [TOKEN] * 2}


def test_what_is_measured_is_what_the_names_say() -> None:
    assert len(_decode_ticks(3)()) == 60
    queue = Queue.build("lpm")
    served = queue.scheduler.state.counters.finished_length
    assert len(queue.pass_us()) == 20
    assert queue.scheduler.state.counters.finished_length >= served + 20
    assert len(queue.scheduler.state.queues.waiting) == 1000
    assert queue.scheduler.state.counters.cached_tokens >= 20 * 512, "families hit their beginning"


def test_only_a_trace_with_all_four_is_shown() -> None:
    def event(what: str, **more: object) -> dict[str, object]:
        return {"what": what, **more}

    events = [event("queued"), event("admitted", waited=[{"ticks": 3}]), event("chunk"), event("chunk"), event("retracted"), event("finished")]
    assert tells_all({"events": events})
    for missing in (1, 2, 4, 5):
        assert not tells_all({"events": events[:missing] + events[missing + 1 :]})
    assert not tells_all({})
