"""Everything that is not generation: time limits, pause, flush, dumps, health, drain, and the loop that calls them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from fixtures.script import Script, generate, prompt_of
from rootlet.core.types import FinishKind
from rootlet.ipc.messages import (
    AbortReq,
    DetokSpec,
    FlushCacheReq,
    FlushCacheReqOutput,
    GetStateReq,
    GetStateReqOutput,
    HealthTick,
    PauseReq,
    ShutdownReq,
)
from rootlet.scheduler.loop import event_loop_normal, event_loop_overlap, run


def answers(script: Script, kind: type) -> list[Any]:
    return [a for a in script.answers if isinstance(a, kind)]


def test_queue_timeout_ends_only_those_who_were_never_admitted() -> None:
    script = Script(max_running=1, queue_timeout=2.0)
    script.turn(generate("runs", prompt_of(4), 50), generate("waits", prompt_of(4, 1), 5))
    script.turn()
    script.clock.advance(2.5)
    script.run()
    script.check_all_replies()
    finish = script.replies["waits"].finish
    assert (finish.kind, finish.status, finish.code) == (FinishKind.ERROR, 504, "deadline_exceeded")
    assert "--queue-timeout (2 s)" in (finish.message or "")
    assert script.replies["runs"].finish.kind is FinishKind.LENGTH


@pytest.mark.parametrize("options, field", [({"request_timeout": 1.0}, {}), ({}, {"deadline_s": 1.0})])
def test_request_timeout_and_deadline_end_a_running_request_with_what_it_has(options: dict[str, Any], field: dict[str, Any]) -> None:
    script = Script(depth=2, **options)
    script.turn(generate("r", prompt_of(4), 500, **field))
    for _ in range(5):
        script.turn()
    script.clock.advance(1.5)
    script.run()
    script.check_all_replies()
    assert script.replies["r"].finish.code == "deadline_exceeded"
    assert 0 < len(script.replies["r"].tokens) < 500


def test_a_retracted_request_is_not_subject_to_the_queue_timeout() -> None:
    script = Script(queue_timeout=1.0, retract_every=2)
    script.turn(generate("r", prompt_of(4), 20))
    while not script.scheduler.idle:
        script.clock.advance(0.3)
        script.turn()
    script.check_all_replies()
    assert script.replies["r"].finish.kind is FinishKind.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pause_freezes_in_place_and_continue_changes_nothing(depth: int) -> None:
    script = Script(depth=depth)
    script.turn(generate("r", prompt_of(30), 12))
    script.turn()
    script.turn(PauseReq("p", paused=True))
    for _ in range(4):
        script.turn()
    steps = script.scheduler.state.step
    script.turn(generate("later", prompt_of(5, 1), 3))
    assert script.scheduler.state.step == steps
    assert not script.scheduler.has_work
    script.turn(AbortReq(rid="later"))
    script.run(PauseReq("p", paused=False))
    script.check_all_replies()
    assert [a.state["paused"] for a in answers(script, GetStateReqOutput)] == [True, False]


def test_flush_answers_at_once_when_told_not_to_wait() -> None:
    script = Script()
    script.turn(generate("r", prompt_of(9), 30), FlushCacheReq("busy"))
    (answer,) = answers(script, FlushCacheReqOutput)
    assert (answer.req_id, answer.success) == ("busy", False)
    assert "0 running, 1 waiting" in answer.message
    script.run()
    script.turn(FlushCacheReq("idle"))
    assert answers(script, FlushCacheReqOutput)[1].success
    assert script.scheduler.state.kv.ledger()["free"] == 64
    script.run(generate("again", prompt_of(9), 3))
    assert script.replies["again"].cached_len == 0


def test_flush_is_parked_until_idle_or_its_time_is_up() -> None:
    script = Script()
    script.turn(generate("r", prompt_of(9), 8), FlushCacheReq("waits", timeout_s=5.0), FlushCacheReq("late", timeout_s=0.5))
    script.clock.advance(1.0)
    script.turn()
    assert [(a.req_id, a.success) for a in answers(script, FlushCacheReqOutput)] == [("late", False)]
    script.run()
    script.turn()
    assert [(a.req_id, a.success) for a in answers(script, FlushCacheReqOutput)] == [("late", False), ("waits", True)]


def test_state_dumps_are_plain_values_and_add_up() -> None:
    script = Script(chunked_prefill=8, max_running=2)
    script.turn(generate("a", prompt_of(9), 30))
    script.turn(generate("b", prompt_of(40, 1), 5), generate("c", prompt_of(9, 2), 5))
    script.turn(*(GetStateReq(what, what) for what in ("info", "state", "metrics", "nonsense")))
    by_id = {a.req_id: a.state for a in answers(script, GetStateReqOutput)}
    msgspec.msgpack.encode(by_id)
    assert by_id["info"]["limits"]["num_pages"] == 64
    assert [r["rid"] for r in by_id["state"]["queues"]["decode"]] == ["a"]
    assert by_id["state"]["queues"]["waiting"][0]["last_why"] == "rows: needs 1, has 0; --max-running is 2"
    ledger = by_id["state"]["ledger"]
    assert ledger["free"] + ledger["evictable"] + ledger["protected"] + ledger["private"] == ledger["total"] == 64
    assert by_id["state"]["plans"][0].startswith("0 EXTEND a.0@1[0,8) -> [")
    gauges = by_id["metrics"]["gauges"]
    assert (gauges["running"], gauges["waiting"], gauges["kv_total_pages"]) == (2, 1, 64)
    assert "unknown state 'nonsense'" in by_id["nonsense"]["error"]
    script.run()
    metrics = script.scheduler.control.metrics()
    assert metrics["counters"]["generated_tokens"] == 40
    assert metrics["histograms"]["ttft_s"]["count"] == 3


def test_health_ticks_come_at_least_once_a_second() -> None:
    script = Script()
    for _ in range(20):
        script.clock.advance(0.25)
        script.turn()
    assert len(answers(script, HealthTick)) == 10


def test_request_log_says_what_happened() -> None:
    script = Script(max_running=1, chunked_prefill=16)
    script.run(generate("a", prompt_of(40), 3), generate("b", prompt_of(40), 3), AbortReq(rid="a", reason="gone"))
    by_rid = {entry["rid"]: entry for entry in script.log}
    assert (by_rid["a"]["finish"], by_rid["a"]["cache_why"]) == ("abort", "never admitted")
    assert by_rid["b"]["num_chunks"] == 3
    script.run(generate("c", prompt_of(40), 3), generate("d", prompt_of(41), 3))
    by_rid = {entry["rid"]: entry for entry in script.log}
    assert by_rid["c"]["cached_len"] == 36
    assert by_rid["d"]["cache_why"].startswith("full hit")
    assert by_rid["d"]["wait_reasons"].keys() == {"rows"}


def test_first_output_carries_the_spec_even_when_it_is_an_error() -> None:
    script = Script()
    script.run(generate("bad", [], 1, detok=DetokSpec(stop=("x",))))
    assert script.replies["bad"].outputs[0].spec == DetokSpec(stop=("x",))


class Feed:
    """`receive` of a loop: hands out messages turn by turn, and moves the clock by what the loop was ready to wait."""

    def __init__(self, script: Script, messages: list[list[Any]]) -> None:
        self.script = script
        self.messages = messages
        self.waits: list[float] = []

    def __call__(self, timeout_s: float) -> list[Any]:
        self.waits.append(timeout_s)
        if self.messages:
            return self.messages.pop(0)
        self.script.clock.advance(max(timeout_s, 0.01))
        return []


@pytest.mark.parametrize("loop", [event_loop_normal, event_loop_overlap, lambda s, r: run(s, r, 3)])
def test_loop_drains_and_returns(loop: Any) -> None:
    script = Script(max_running=2)
    early, late = generate("early", prompt_of(9), 20), generate("late", prompt_of(5, 2), 3)
    script.sent.update(early=early, late=late)
    feed = Feed(script, [[early], [], [ShutdownReq(drain_s=30.0), late]])
    loop(script.scheduler, feed)
    script.check_all_replies()
    assert script.replies["early"].finish.kind is FinishKind.LENGTH
    assert (script.replies["late"].finish.status, script.replies["late"].finish.code) == (503, "shutting_down")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drain_ends_what_is_not_ready_in_time(depth: int) -> None:
    script = Script(num_pages=1024)
    msgs = [generate(f"r{i}", prompt_of(9, i), 1000) for i in range(3)]
    script.sent.update({m.rid: m for m in msgs})
    run(script.scheduler, Feed(script, [msgs, [], [ShutdownReq(drain_s=0.2)]]), depth)
    script.check_all_replies()
    assert {r.finish.code for r in script.replies.values()} == {"shutting_down"}
    assert all(r.tokens for r in script.replies.values())


def test_second_shutdown_with_no_time_ends_at_once_even_when_paused() -> None:
    script = Script(depth=2)
    msg = generate("r", prompt_of(9), 4000)
    script.sent["r"] = msg
    feed = Feed(script, [[msg], [PauseReq("p", paused=True)], [ShutdownReq(drain_s=1e9)], [ShutdownReq(drain_s=0.0)]])
    run(script.scheduler, feed, 2)
    script.check_all_replies()
    assert script.replies["r"].finish.code == "shutting_down"


def test_loop_blocks_only_when_there_is_nothing_to_do() -> None:
    script = Script()
    script.sent["r"] = generate("r", prompt_of(9), 3)
    feed = Feed(script, [[], [script.sent["r"]], [], [], [], [], [ShutdownReq(drain_s=0.0)]])
    run(script.scheduler, feed, 1)
    assert feed.waits[0] == 0.5  # until the next health tick
    assert feed.waits[2:4] == [0.0, 0.0]


def test_ready_message_has_the_clamps() -> None:
    ready = Script(num_pages=8, page_size=4).scheduler.ready_message()
    assert (ready.max_prompt_len, ready.num_pages, ready.max_rows, ready.max_context_len) == (32, 8, 8, 4096)
    assert Script(num_pages=4096, page_size=4).scheduler.ready_message().max_prompt_len == 4095


def test_the_control_wing_loads_no_torch() -> None:
    code = "import sys, rootlet.scheduler.loop, rootlet.core.hash_lm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_time_limits_of_ended_requests_are_forgotten() -> None:
    script = Script(request_timeout=1e6, queue_timeout=1e6)
    for i in range(400):
        script.run(generate(f"r{i}", prompt_of(3), 1))
    assert script.scheduler.control.deadlines.pending <= 256
