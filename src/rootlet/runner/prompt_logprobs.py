"""Log-probabilities of prompt tokens: computed after the forward from its hidden states, a few rows at a time, so that logits of a whole prompt never
lie in memory at once. Rare, so it runs outside the graph.

Positions (core/step.py, `RowResult`): a chunk [a, b) predicts the tokens at a+1..b; wanted are those that are prompt positions >= prompt_start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from rootlet.core.step import IntArray, RowInit, RowResult, StepPlan
from rootlet.core.types import TokenLogprob
from rootlet.sampling.logprobs import raw_logprobs

BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Wanted:
    prompt_ids: IntArray
    start: int
    top_n: int


class PromptLogprobs:
    """Remembers, per pool row, which prompt positions a request asked for."""

    __slots__ = ("_logits", "_native", "_wanted")

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor], *, native: bool) -> None:
        """`logits(hidden [T, hidden], rows int32 [R])` -> [R, V], the model's head."""
        self._logits = logits
        self._native = native
        self._wanted: dict[int, _Wanted] = {}

    def init_row(self, init: RowInit) -> None:
        """A pool row is (re)built: whatever it wanted before is forgotten."""
        self._wanted.pop(init.pool_row, None)
        if init.logprobs is not None and init.logprobs.prompt_start is not None:
            self._wanted[init.pool_row] = _Wanted(init.prompt_ids, init.logprobs.prompt_start, init.logprobs.top_n)

    def add(self, plan: StepPlan, hidden: Tensor, rows: list[RowResult]) -> None:
        """Puts the prompt logprobs of this step into `rows`, in place. `hidden`: the step's hidden states before the final norm."""
        if not self._wanted:
            return
        first_token = 0
        for b, (pool_row, start, count) in enumerate(zip(plan.pool_rows.tolist(), plan.prefix_lens.tolist(), plan.extend_lens.tolist(), strict=True)):
            wanted = self._wanted.get(pool_row)
            if wanted is not None and rows[b].error is None:
                rows[b] = msgspec.structs.replace(rows[b], prompt_logprobs=tuple(self._chunk(wanted, hidden, first_token, start=start, count=count)))
                if start + count >= len(wanted.prompt_ids):
                    del self._wanted[pool_row]
            first_token += count

    def _chunk(self, wanted: _Wanted, hidden: Tensor, first_token: int, *, start: int, count: int) -> list[TokenLogprob]:
        """Entries of the chunk at positions [start, start + count), whose tokens are rows first_token.. of `hidden`."""
        begin = max(start + 1, wanted.start)
        end = min(start + count, len(wanted.prompt_ids) - 1) + 1
        entries: list[TokenLogprob] = []
        for low in range(begin, end, BLOCK_ROWS):
            positions = np.arange(low, min(low + BLOCK_ROWS, end), dtype=np.int32)
            token_rows = torch.from_numpy(positions - 1 - start + first_token)
            targets = torch.from_numpy(np.ascontiguousarray(wanted.prompt_ids[positions]))
            entries += raw_logprobs(self._logits(hidden, token_rows), targets, wanted.top_n, native=self._native)
        return entries
