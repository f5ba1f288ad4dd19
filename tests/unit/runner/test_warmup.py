"""The two throw-away steps stay inside the smallest capacity, in the padding row and the sink page."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from rootlet.core.step import Capacity, StepPlan, StepResult
from rootlet.runner.warmup import warm_up


class Recorder:
    """A runner that keeps its plans."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(plan.step, (), 0.25)


@pytest.mark.parametrize(("context", "step", "prompt"), [(4096, 512, 32), (8, 512, 7), (4096, 5, 5)])
def test_warm_up_fits_the_smallest_capacity(context: int, step: int, prompt: int) -> None:
    capacity = Capacity(num_pages=1, page_size=16, max_rows=1, max_context_len=context, max_step_tokens=step, vocab_size=10)
    runner = Recorder(capacity)
    assert warm_up(cast(Any, runner)) == 0.25
    first, second = runner.plans
    assert np.concatenate((first.positions, second.positions)).tolist() == list(range(prompt + 1))
    assert (first.prefix_lens.tolist(), second.prefix_lens.tolist(), second.seq_lens.tolist()) == ([0], [prompt], [prompt + 1])
    for plan in runner.plans:
        assert plan.pool_rows.tolist() == [0]
        assert plan.page_deltas == ()
        assert (plan.out_cache_loc < 16).all()
    assert [init.pool_row for init in first.row_inits] == [0]
    assert second.row_inits == ()
