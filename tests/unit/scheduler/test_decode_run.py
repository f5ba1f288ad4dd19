"""What plans of a decode run share, and when a run ends. That the slots are right over page edges is law I6, checked after every turn of `Script`."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fixtures.script import Script, generate, prompt_of
from rootlet.core.step import StepPlan
from rootlet.core.types import ForwardMode
from rootlet.ipc.messages import AbortReq


def decodes(script: Script) -> list[StepPlan]:
    return [plan for plan in script.plans if plan.mode is ForwardMode.DECODE]


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_of_the_same_rows_share_what_does_not_change(depth: int) -> None:
    script = Script(depth=depth)
    script.run(generate("a", prompt_of(5), 14), generate("b", prompt_of(6, 1), 14))
    plans = decodes(script)
    assert len(plans) >= 12
    assert len({id(plan.pool_rows) for plan in plans}) == len({plan.rids for plan in plans})
    for before, after in pairwise(plans):
        if before.rids == after.rids:
            assert after.pool_rows is before.pool_rows
            assert (after.positions == before.positions + 1).all()
    script.check_all_replies()


def test_a_retracted_row_begins_another_run() -> None:
    script = Script(retract_every=3)
    script.run(generate("a", prompt_of(5), 16), generate("b", prompt_of(6, 1), 16))
    runs = {id(plan.pool_rows): plan for plan in decodes(script)}
    assert {tuple(plan.epochs.tolist()) for plan in runs.values()} == {tuple(plan.epochs.tolist()) for plan in decodes(script)}
    assert max(max(plan.epochs.tolist()) for plan in runs.values()) >= 1
    script.check_all_replies()


def test_a_row_that_leaves_ends_the_run() -> None:
    script = Script()
    script.turn(generate("a", prompt_of(5), 30), generate("b", prompt_of(6, 1), 30))
    for _ in range(6):
        script.turn()
    both = decodes(script)[-1]
    script.turn(AbortReq("a"))
    alone = decodes(script)[-1]
    assert (both.rids, alone.rids) == (("a", "b"), ("b",))
    assert alone.pool_rows is not both.pool_rows
