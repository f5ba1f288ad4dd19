"""Preemption, delayed prefill, pausing, timelines: who gives way, for how long, and what is told about it."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.script import Script, generate, prompt_of
from rootlet.core.types import FinishKind, Phase
from rootlet.ipc.messages import AbortReq, FlushCacheReq, GetStateReq, PauseReq
from rootlet.scheduler.preemption import choose
from rootlet.scheduler.timeline import MAX_EVENTS, MAX_FINISHED, Timeline, WaitLog

DEPTHS = [1, 2, 3]


def counters(script: Script) -> Any:
    return script.scheduler.state.counters


def running(script: Script) -> list[str]:
    return sorted(r.rid for r in script.scheduler.state.queues.holders())


def full(script: Script, *priorities: int, max_new: int = 30) -> Script:
    """One running request for each priority, all decoding."""
    script.turn(*(generate(f"p{p}", prompt_of(8, i), max_new, priority=p) for i, p in enumerate(priorities)))
    for _ in range(6):
        script.turn()
    return script


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", ["fcfs", "lof"])
def test_a4_a_much_more_important_request_takes_a_row_in_the_same_tick(depth: int, policy: str) -> None:
    script = full(Script(depth=depth, max_running=3, schedule_policy=policy), 0, 5, 3)
    assert len(running(script)) == 3
    script.turn(generate("high", prompt_of(8, 9), 4, priority=50))
    if depth > 1:
        script.turn()
    assert running(script) == ["high", "p3", "p5"]  # the worst gives way, and only that one
    assert counters(script).preemptions == 1
    script.run()
    script.check_all_replies()  # the same tokens afterwards
    assert counters(script).retractions == 0


@pytest.mark.parametrize("priority, preempts", [(10, False), (11, True)])
def test_the_gap_must_be_more_than_the_knob(priority: int, preempts: bool) -> None:
    script = full(Script(max_running=1), 0)
    script.turn(generate("new", prompt_of(8, 9), 4, priority=priority))
    assert counters(script).preemptions == preempts
    script.run()
    script.check_all_replies()


@pytest.mark.parametrize("options", [{"preempt_gap": -1}, {"schedule_policy": "lpm"}, {"schedule_policy": "vtc"}])
def test_preemption_is_off_by_knob_and_under_other_policies(options: dict[str, Any]) -> None:
    script = full(Script(max_running=1, **options), 0)
    script.turn(generate("new", prompt_of(8, 9), 4, priority=1000))
    assert counters(script).preemptions == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_a5_no_more_victims_than_the_pages_need(depth: int) -> None:
    """Four running requests reserve the pool; the newcomer needs as many pages as two of them give."""
    script = Script(depth=depth, num_pages=40, page_size=4, cache=None, conservativeness=10.0)
    full(script, 0, 1, 2, 3, max_new=30)
    assert len(running(script)) == 4
    script.turn(generate("high", prompt_of(60, 9), 4, priority=50))
    if depth > 1:
        script.turn()
    assert running(script) == ["high", "p2", "p3"]
    assert counters(script).preemptions == 2
    script.run()
    script.check_all_replies()


def test_nobody_is_preempted_when_even_all_would_not_be_enough() -> None:
    script = Script(num_pages=20, page_size=4, conservativeness=10.0)
    full(script, 0, 45, max_new=30)
    script.turn(generate("high", prompt_of(60, 9), 4, priority=50))  # needs 16 pages; p45 keeps 10 of 20 and is not far enough below
    assert counters(script).preemptions == 0
    script.run()
    script.check_all_replies()


def test_pages_that_a_victim_has_drawn_into_count() -> None:
    """Nothing is reserved here: of 20 pages the running one has drawn into 12 and borrows 2 from the tree, and the newcomer needs 16."""
    script = Script(num_pages=20, page_size=4, conservativeness=0.0)
    script.turn(generate("low", prompt_of(8), 60))
    while script.scheduler.state.kv.ledger()["private"] < 12:
        script.turn()
    script.turn(generate("high", prompt_of(60, 9), 4, priority=50))
    assert running(script) == ["high"]
    script.run()
    script.check_all_replies()


def test_choose_takes_the_first_that_are_enough_and_drops_who_is_not_needed() -> None:
    gives = {"a": 1, "b": 0, "c": 4, "d": 9}
    able: list[Any] = list(gives)
    assert choose(able, lambda some: sum(gives[str(r)] for r in some) >= 4) == ["c"]
    assert choose(able, lambda some: sum(gives[str(r)] for r in some) >= 5) == ["a", "c"]
    assert choose(able, lambda some: False) == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_preempted_at_every_tick_a_request_still_gives_the_same_tokens(depth: int) -> None:
    for when in range(16):
        script = Script(depth=depth, max_running=1, chunked_prefill=8, page_size=4)
        script.turn(generate("low", prompt_of(21), 8, temperature=0.9, frequency_penalty=0.5))
        for _ in range(when):
            script.turn()
        script.run(generate("high", prompt_of(9, 3), 2, priority=99))
        script.check_all_replies()


# ---- delayed prefill ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_min_free_slots_admits_in_groups_and_only_while_something_runs(depth: int) -> None:
    script = Script(depth=depth, max_running=4, min_free_slots=3)
    script.turn(*(generate(f"r{i}", prompt_of(6, i), 4 + 4 * i) for i in range(4)))
    script.turn(*(generate(f"s{i}", prompt_of(6, 10 + i), 4) for i in range(3)))
    seen = set()
    while not script.replies.get("s0"):
        seen.add(script.scheduler.state.waits.reason)
        script.turn()
    assert "min-free-slots" in seen
    admitted = [script.scheduler.state.finished.get(f"r{i}") for i in range(3)]
    assert all(a is not None for a in admitted[:2])  # three of four rows were free
    script.run()
    script.check_all_replies()


@pytest.mark.parametrize("interval", [0, 3])
def test_decode_interval_bounds_how_often_a_long_prompt_holds_up_decoding(interval: int) -> None:
    script = Script(chunked_prefill=8, decode_interval=interval)
    script.turn(generate("talker", prompt_of(4), 60))
    script.turn(generate("long", prompt_of(64, 3), 2))
    script.run()
    script.check_all_replies()
    kinds = "".join("P" if p.mode.name == "EXTEND" else "D" for p in script.plans)
    gaps = [len(run) for run in kinds.strip("D").split("P")[1:-1]]
    assert gaps == [interval] * 8


# ---- pausing --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_modes(mode: Any, depth: int) -> None:
    script = full(Script(depth=depth, max_running=3), 0, 1, 2, max_new=40)
    script.turn(generate("waits", prompt_of(5, 9), 4))
    script.turn(PauseReq("p", paused=True, mode=mode))
    for _ in range(depth + 1):
        script.turn()
    state = script.scheduler.state
    steps = state.step
    script.turn(generate("late", prompt_of(5, 8), 4))
    assert state.step == steps
    assert not state.in_flight
    assert len(running(script)) == (3 if mode == "in_place" else 0)
    assert state.kv.ledger()["private"] == 0 or mode == "in_place"
    script.turn(PauseReq("p", paused=False))
    script.run()
    script.check_all_replies()
    kinds = {rid: reply.finish.kind for rid, reply in script.replies.items()}
    assert kinds.pop("late") is FinishKind.LENGTH
    assert set(kinds.values()) == {FinishKind.ABORT if mode == "abort" else FinishKind.LENGTH}


def test_paused_by_retraction_the_cache_can_be_emptied_page_by_page_and_resumes() -> None:
    script = full(Script(), 0, 1)
    script.turn(PauseReq("p", paused=True, mode="retract"), FlushCacheReq("f"))
    assert script.answers[-1].success is False  # requests wait, so the server is not idle
    assert script.scheduler.state.kv.cache.protected_pages == 0
    script.turn(PauseReq("p", paused=False))
    script.run()
    script.check_all_replies()


# ---- timelines ------------------------------------------------------------------------------------------------------------------------------


def timeline(script: Script, rid: str) -> dict[str, Any]:
    script.turn(GetStateReq("q", "request", {"rid": rid}))
    return dict(script.answers[-1].state.get("request", {}))


def test_a_timeline_tells_every_turn_of_a_life_and_explains_each_tick_of_waiting() -> None:
    script = Script(max_running=1, chunked_prefill=8, retract_every=6)
    script.turn(generate("first", prompt_of(8), 6))
    script.turn(generate("r", prompt_of(20, 3), 8, priority=1, user="u"))
    for _ in range(2):
        script.turn()
    waiting = timeline(script, "r")
    assert waiting["phase"] == "waiting"
    assert waiting["waiting_for"][-1]["reason"] == "rows"
    script.run()
    done = timeline(script, "r")
    assert (done["phase"], done["user"], done["prompt_len"]) == ("done", "u", 20)
    whats = [e["what"] for e in done["events"]]
    assert whats[:6] == ["queued", "admitted", "chunk", "chunk", "chunk", "first token"]
    assert whats[-1] == "finished"
    assert "retracted" in whats
    assert [(e["start"], e["stop"], e["of"]) for e in done["events"][2:5]] == [(0, 8, 20), (8, 16, 20), (16, 20, 20)]
    queued, admitted = done["events"][:2]
    assert admitted["tick"] - queued["tick"] - 1 == sum(w["ticks"] for w in admitted["waited"])  # no tick is unexplained
    assert all("--max-running is 1" in w["why"] for w in admitted["waited"])
    assert [e["tick"] for e in done["events"]] == sorted(e["tick"] for e in done["events"])


def test_an_unknown_request_has_no_timeline_and_the_ring_forgets_the_oldest() -> None:
    script = Script(max_queue=10_000)
    for i in range(MAX_FINISHED + 3):
        script.turn(generate(f"r{i}", prompt_of(3), 0), AbortReq(rid=f"r{i}"))
    script.run()
    assert timeline(script, "nobody") == {}
    assert timeline(script, "r2") == {}
    assert timeline(script, "r3")["events"][-1]["why"] == "abort"


def test_waits_are_coalesced_by_reason_and_cut_to_the_ticks_asked_for() -> None:
    log = WaitLog()
    for tick, reason in enumerate(["rows", "rows", "pages", "pages", "rows"], start=1):
        log.note(tick, reason, f"{reason} at {tick}")
    assert [(w["reason"], w["first_tick"], w["last_tick"]) for w in log.between(2, 4)] == [("rows", 2, 2), ("pages", 3, 4)]
    assert log.between(1, 9)[-1]["why"] == "rows at 5"
    assert log.between(6, 9) == []
    log.note(9, "rows", "later")
    assert log.between(5, 9)[0]["ticks"] == 1


def test_a_timeline_is_bounded_and_keeps_its_beginning_and_its_end() -> None:
    line = Timeline()
    for i in range(3 * MAX_EVENTS):
        line.note(i, float(i), "chunk")
    dump = line.dump()
    assert len(dump["events"]) == MAX_EVENTS
    assert dump["dropped_events"] == 2 * MAX_EVENTS
    assert dump["events"][0]["tick"] == 0
    assert dump["events"][-1]["tick"] == 3 * MAX_EVENTS - 1


def test_priority_decides_who_is_retracted() -> None:
    script = Script(num_pages=16, page_size=4, conservativeness=0.0)
    script.turn(generate("low", prompt_of(8), 40), generate("high", prompt_of(8, 3), 40, priority=5))
    while counters(script).retractions == 0:
        script.turn()
    assert script.scheduler.state.queues.by_rid["low"].phase is Phase.WAITING
    script.run()
    script.check_all_replies()
