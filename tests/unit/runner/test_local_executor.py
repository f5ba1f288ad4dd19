"""The executor's manners: order, failures of a step, death, in both threading modes. The worker is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from rootlet.core.errors import Unavailable, Unsupported
from rootlet.core.step import Capacity, ControlOp, RowResult, StepPlan, StepResult
from rootlet.core.types import ForwardMode
from rootlet.runner.local_executor import LocalExecutor
from rootlet.runner.worker import Worker

I32 = np.zeros(2, np.int32)


def plan(step: int) -> StepPlan:
    return StepPlan(step, ForwardMode.DECODE, ("a", "b"), I32, I32, I32, I32, np.ones(2, np.bool_), I32, I32, I32)


class FakeRunner:
    """Answers a step with its number; raises what it was told to at a step."""

    capacity = Capacity(1, 16, 2, 16, 16, 10)
    graph = None

    def __init__(self, failures: dict[int, BaseException]) -> None:
        self._failures = failures

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step in self._failures:
            raise self._failures[plan.step]
        return StepResult(plan.step, (RowResult(tokens=(plan.step,)),) * 2)

    def close(self) -> None:
        """Nothing to free."""


@pytest.fixture(params=[False, True], ids=["caller's thread", "own thread"])
def threaded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, threaded: bool) -> Iterator[Any]:
    made: list[LocalExecutor] = []

    def build(failures: dict[int, BaseException]) -> LocalExecutor:
        worker = Worker(cast(Any, FakeRunner(failures)), cast(Any, None), {"model": "fake"}, ("sum",))
        monkeypatch.setattr("rootlet.runner.local_executor.build_worker", lambda *args, **kwargs: worker)
        made.append(LocalExecutor(cast(Any, None), cast(Any, None), threaded=threaded))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def test_results_come_in_order_of_plans(make: Any) -> None:
    executor = make({})
    executor.submit(plan(1))
    executor.submit(plan(2))
    assert executor.collect().step == 1
    executor.submit(plan(3))
    assert [executor.collect().step, executor.collect().step] == [2, 3]
    assert executor.control(ControlOp("state"))["steps"] == 3
    assert executor.memory_sum == ("sum",)


def test_depth_is_bounded(make: Any) -> None:
    executor = make({})
    executor.submit(plan(1))
    executor.submit(plan(2))
    with pytest.raises(AssertionError):
        executor.submit(plan(3))
    executor.collect()
    executor.collect()


def test_a_failing_step_fails_its_rows_and_the_next_one_runs(make: Any) -> None:
    executor = make({1: RuntimeError("no memory for scratch")})
    executor.submit(plan(1))
    executor.submit(plan(2))
    failed = executor.collect()
    assert [row.error for row in failed.rows] == ["the step that computed this request failed: no memory for scratch"] * 2
    assert executor.collect().rows[0].tokens == (2,)
    assert executor.control(ControlOp("state"))["failed_steps"] == 1


def test_a_bug_is_not_hidden(make: Any, threaded: bool) -> None:
    executor = make({1: AssertionError("invariant")})
    if not threaded:
        with pytest.raises(AssertionError, match="invariant"):
            executor.submit(plan(1))
        return
    executor.submit(plan(1))
    with pytest.raises(Unavailable, match="invariant") as error:
        executor.collect()
    assert error.value.code == "engine_dead"


def test_unknown_control_names_the_known_ones(make: Any) -> None:
    executor = make({})
    assert executor.control(ControlOp("flush")) == {}
    with pytest.raises(Unsupported, match="record none"):
        executor.control(ControlOp("profile"))
    with pytest.raises(Unsupported, match="known: flush, profile, state"):
        executor.control(ControlOp("levitate"))


def test_close_is_idempotent(make: Any) -> None:
    executor = make({})
    executor.close()
    executor.close()
