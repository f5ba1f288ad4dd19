"""`ForwardBatch`: the tokens of one step as tensors at fixed addresses, so that a captured graph reads each new step through the old ones.

Owns `input_ids`, `positions` and the rows whose logits are needed. Lengths, slots and page tables belong to the attention backend, relayed tokens to
the sampler. Filled once a step from a `StepPlan`; O(tokens) numpy, nothing allocated in proportion to the batch.
"""

from __future__ import annotations

import numpy as np
import torch

from rootlet.core.step import Capacity, IntArray, StepPlan
from rootlet.core.types import ForwardMode
from rootlet.sampling.sampler import Sampler


class ForwardBatch:
    """int32 buffers: `input_ids`, `positions` [max_step_tokens], `logit_rows` [max_rows]; entries beyond the step's counts hold valid zeros."""

    __slots__ = (
        "_decoded_rows",
        "_input_ids",
        "_logit_rows",
        "_positions",
        "input_ids",
        "logit_rows",
        "num_logit_rows",
        "num_rows",
        "num_tokens",
        "positions",
    )

    def __init__(self, capacity: Capacity) -> None:
        self._input_ids = np.zeros(capacity.max_step_tokens, np.int32)
        self._positions = np.zeros(capacity.max_step_tokens, np.int32)
        self._logit_rows = np.zeros(capacity.max_rows, np.int32)
        self.input_ids = torch.from_numpy(self._input_ids)
        self.positions = torch.from_numpy(self._positions)
        self.logit_rows = torch.from_numpy(self._logit_rows)
        self.num_tokens = self.num_rows = self.num_logit_rows = 0
        self._decoded_rows: IntArray | None = None

    def fill(self, plan: StepPlan, sampler: Sampler) -> None:
        """Takes over the plan's tokens; RELAY entries are read from the sampler, so the previous plan must have sampled. Logit row r is the last
        token of the r-th row that samples."""
        sampler.gather_input_ids(plan, self._input_ids)
        self._positions[: plan.num_tokens] = plan.positions
        if plan.pool_rows is self._decoded_rows:
            return  # the rows of the step before, one token each as then
        self._decoded_rows = None  # until all of it is there
        self.num_tokens, self.num_rows = plan.num_tokens, plan.num_rows
        last = (np.cumsum(plan.extend_lens) - 1)[plan.sample]
        self.num_logit_rows = len(last)
        self._logit_rows[: self.num_logit_rows] = last
        self._decoded_rows = plan.pool_rows if plan.mode is ForwardMode.DECODE else None
