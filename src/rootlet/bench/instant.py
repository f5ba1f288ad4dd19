"""An executor that costs nothing and draws always the same token, for measurements of the control wing; and requests for it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import Capacity, ControlOp, RowResult, StepPlan, StepResult
from rootlet.ipc.messages import DetokSpec, TokenizedGenerateReqInput

TOKEN = 5


class InstantExecutor:
    """Satisfies `Executor`. Results are made at `collect`, a tuple of shared rows, so that hardly anything is spent there. `plans` counts."""

    def __init__(self, capacity: Capacity) -> None:
        self.plans = 0
        self._capacity = capacity
        self._queue: deque[StepPlan] = deque()
        self._drawn, self._silent = RowResult((TOKEN,)), RowResult()

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        self.plans += 1
        self._queue.append(plan)

    def collect(self) -> StepResult:
        plan = self._queue.popleft()
        return StepResult(plan.step, tuple(self._drawn if sampled else self._silent for sampled in plan.sample.tolist()))

    def control(self, op: ControlOp) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._queue.clear()


def request(rid: str, ids: bytes | npt.NDArray[np.integer], max_new: int) -> TokenizedGenerateReqInput:
    """Streams, and ends after exactly `max_new` tokens."""
    packed = ids if isinstance(ids, bytes) else np.asarray(ids, dtype="<i4").tobytes()
    params = SamplingParams(max_new_tokens=max_new, temperature=0.0, seed=1, ignore_eos=True)
    return TokenizedGenerateReqInput(rid=rid, input_ids=packed, sampling=params, detok=DetokSpec(), stream=True)
