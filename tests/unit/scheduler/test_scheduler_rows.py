"""The table of docs/scheduler-rows.md is complete and true; and the rows of it that have no better place."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.script import Script, generate, prompt_of
from rootlet.core.step import StepPlan
from rootlet.core.types import FinishKind, LogprobSpec, Phase
from rootlet.scheduler.control import plan_line
from rootlet.scheduler.state import retract_req

TESTS = Path(__file__).resolve().parents[2]
TABLE = TESTS.parent / "docs" / "scheduler-rows.md"
ROWS = [f"{letter}{n}" for letter, last in (("A", 9), ("B", 8), ("C", 8), ("D", 9), ("E", 7), ("F", 7)) for n in range(1, last + 1)]
NOT_BUILT = {"B5", "D9"}


def table() -> dict[str, str]:
    found = re.findall(r"^\| ([A-F]\d) \| [^|]+ \| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    assert len(found) == len(dict(found)), "a row twice"
    return dict(found)


def test_every_row_is_in_the_table_once() -> None:
    assert sorted(table()) == sorted(ROWS)
    assert {row for row, cell in table().items() if cell.startswith("not built: ")} == NOT_BUILT


@pytest.mark.parametrize("row", [row for row in ROWS if row not in NOT_BUILT])
def test_the_named_test_exists(row: str) -> None:
    path, _, name = table()[row].strip("`").partition("::")
    tree = ast.parse((TESTS / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_b7_every_request_beyond_the_queue_is_answered() -> None:
    script = Script(max_running=1, max_queue=3)
    script.run(*(generate(f"r{i}", prompt_of(9, i), 20) for i in range(12)))
    refused = [rid for rid, reply in script.replies.items() if reply.finish.code == "queue_full"]
    assert len(script.replies) == 12
    assert sorted(refused) == sorted(f"r{i}" for i in range(4, 12))  # one row, three places to wait
    assert all(script.replies[rid].finish.status == 503 for rid in refused)


def test_b7_a_burst_finds_the_free_rows_as_well_as_the_queue() -> None:
    """40 at once, 32 rows and 8 places: nobody runs yet when the last is counted, and still nobody is refused. The 41st is, before any work."""
    script = Script(max_running=32, max_queue=8, num_pages=256, capacity={"max_rows": 32})
    script.turn(*(generate(f"r{i}", prompt_of(3, i), 4) for i in range(41)))
    assert [rid for rid, reply in script.replies.items() if reply.terminals] == ["r40"]
    assert script.replies["r40"].finish.code == "queue_full"
    assert "--max-running is 32 and --max-queue 8" in script.replies["r40"].finish.message
    script.run()
    script.check_all_replies()
    assert sum(reply.finish.kind is FinishKind.LENGTH for reply in script.replies.values()) == 40


def lines_of(*, start_s: float, pace_s: float) -> list[str]:
    script = Script(depth=2, max_running=3, num_pages=24, chunked_prefill=16, schedule_policy="hrrn", retract_every=5)
    script.clock.advance(start_s)
    rng = random.Random(4)
    for i in range(30):
        script.clock.advance(pace_s)
        script.turn(*(generate(f"r{i}.{k}", prompt_of(rng.randint(1, 40), i % 3, shared=8), rng.randint(1, 12)) for k in range(rng.randint(0, 2))))
    script.run()
    script.check_all_replies()
    return [plan_line(plan) for plan in script.plans]


def test_b8_another_clock_makes_no_other_plan() -> None:
    assert lines_of(start_s=0.0, pace_s=0.001) == lines_of(start_s=1e6, pace_s=0.7)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c6_as_many_logprobs_as_tokens_at_every_turn(depth: int) -> None:
    script = Script(depth=depth, chunked_prefill=16, retract_every=3)
    spec = LogprobSpec(top_n=2, prompt_start=4)
    script.turn(*(generate(f"r{i}", prompt_of(30 + i, i), 14, logprobs=spec if i % 2 else None, stream=True) for i in range(4)))
    while not script.scheduler.idle:
        script.turn()
        for rid, reply in script.replies.items():
            assert len(reply.logprobs) == (len(reply.tokens) if script.sent[rid].logprobs else 0), rid
    script.check_all_replies()
    assert script.scheduler.state.counters.retractions > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", range(1, 8))
def test_c7_retracted_again_in_the_middle_of_computing_anew(after: int, depth: int) -> None:
    script = Script(depth=depth, chunked_prefill=4, page_size=4)
    script.turn(generate("r", prompt_of(30), 20), generate("other", prompt_of(22, 1), 20))
    state, times = script.scheduler.state, 0
    since = 0
    while not script.scheduler.idle:
        script.turn()
        req = state.queues.by_rid.get("r")
        since += 1
        again = req is not None and req.phase is Phase.PREFILL and req.epoch > 0 and times < 4 and since >= after
        if req is not None and ((req.phase is Phase.DECODE and times == 0 and len(req.outputs) == 3) or again):
            retract_req(state, req)
            assert state.kv.cache.ensure_pages(state.kv.cache.available_pages), "what it had shared is forgotten"
            times, since = times + 1, 0
    script.check_all_replies()
    assert times > 1


def test_d4_a_launched_plan_is_never_written_again() -> None:
    """Arrays may be shared between plans, so each must stay as it was launched, until the end of the run."""
    script = Script(depth=2, mode="late", chunked_prefill=16, mixed_chunk=True, retract_every=4, page_size=2)
    submit = script.executor.submit
    kept: list[tuple[StepPlan, dict[str, Any]]] = []

    def noted(plan: StepPlan) -> None:
        kept.append((plan, {name: array.copy() for name, array in arrays(plan).items()}))
        submit(plan)

    script.executor.submit = noted  # type: ignore[method-assign]
    script.run(*(generate(f"r{i}", prompt_of(9 + 7 * i, i % 2, shared=6), 12) for i in range(6)))
    script.check_all_replies()
    for plan, copies in kept:
        for name, array in arrays(plan).items():
            assert np.array_equal(array, copies[name]), f"plan {plan.step}: {name} was written after its launch"


def arrays(plan: StepPlan) -> dict[str, Any]:
    return {name: value for name in StepPlan.__slots__ if isinstance(value := getattr(plan, name), np.ndarray)}
