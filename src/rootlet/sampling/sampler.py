"""Picks tokens: the executor's one object between logits and `RowResult`.

Owns the sampling state of every pool row (compiled parameters, penalty counts, number of outputs) and the relay (FutureMap): the last token each
pool row drew, from which the next step reads ids that the host does not know yet. State changes only in `init_row` and right after a draw, in plan
order, so depth 2 needs no second copy. Does not run the model, does not decide when a request ends. Called by the runner:
init_row* -> gather_input_ids -> prepare -> (forward) -> sample -> collect, for each plan in order.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rootlet.core.step import RELAY, RowInit, RowResult, StepPlan
from rootlet.kernels.reference_sampling import NOT_FINITE, OK, ReferenceSampleState, SampleRow
from rootlet.sampling.batch import compile_row, sampled_rows
from rootlet.sampling.logprobs import token_logprob

I32 = npt.NDArray[np.int32]


class SampleState(Protocol):
    """Row state behind one implementation of the op `sample`: reference (numpy) or native."""

    relay: I32
    tokens: I32
    status: I32

    def init_row(self, row: SampleRow) -> None: ...

    def begin(self, pool_rows: I32) -> None: ...

    def sample(self, logits: Tensor) -> None: ...

    def outputs(self, pool_row: int) -> int: ...

    def logprobs(self, r: int) -> tuple[float, list[int], list[float]] | None: ...


def make_state(*, max_rows: int, vocab_size: int, max_logit_rows: int, native: bool) -> SampleState:
    """The state of the implementation asked for; `native` needs the built library."""
    if not native:
        return ReferenceSampleState(max_rows, vocab_size, max_logit_rows)
    from rootlet.kernels.cpu.sample_ops import NativeSampleState

    return NativeSampleState(max_rows, vocab_size, max_logit_rows)


class Sampler:
    """`max_rows` pool rows (1..max_rows), `max_logit_rows` rows that can draw in one step."""

    __slots__ = ("_relay", "_state", "_wants_logprobs", "vocab_size")

    def __init__(self, *, max_rows: int, vocab_size: int, max_logit_rows: int, native: bool) -> None:
        self.vocab_size = vocab_size
        self._state = make_state(max_rows=max_rows, vocab_size=vocab_size, max_logit_rows=max_logit_rows, native=native)
        self._relay = self._state.relay
        self._wants_logprobs: set[int] = set()

    @property
    def relay(self) -> Tensor:
        """int32 [max_rows + 1] by pool row: the token drawn last. Static; 0 after a failed draw, so it is always a valid id."""
        return torch.from_numpy(self._relay)

    def init_row(self, init: RowInit) -> None:
        """(Re)build a pool row's state: parameters, number of outputs so far, penalty counts over `prompt_ids` and `output_ids`."""
        self._state.init_row(compile_row(init, self.vocab_size))
        self._wants_logprobs.discard(init.pool_row)
        if init.logprobs is not None:
            self._wants_logprobs.add(init.pool_row)
        if len(init.output_ids):
            self._relay[init.pool_row] = init.output_ids[-1]

    def prepare(self, plan: StepPlan) -> None:
        """Name the rows that draw in this step; host work, before the graph is replayed."""
        self._state.begin(sampled_rows(plan))

    def sample(self, logits: Tensor) -> None:
        """logits float32 [>= R, V], R = number of sampled rows, in row order; writes tokens to the relay. The native op records itself under
        capture and may change `logits`."""
        self._state.sample(logits)

    def gather_input_ids(self, plan: StepPlan, out_ids: I32) -> None:
        """Write the plan's input ids to out_ids [>= T], RELAY resolved from the relay. After the previous plan's `sample`."""
        ids = plan.input_ids
        if np.minimum.reduce(ids, initial=0) == RELAY:  # ids are >= 0 but for this one
            late = np.flatnonzero(ids == RELAY)
            ids = ids.copy()
            ids[late] = self._relay[np.repeat(plan.pool_rows, plan.extend_lens)[late]]
        out_ids[: len(ids)] = ids

    def collect(self, plan: StepPlan) -> list[RowResult]:
        """One `RowResult` a plan row, empty for a row that did not draw; call right after the plan's `sample`."""
        drawn = np.flatnonzero(plan.sample)
        tokens, status = self._state.tokens[: len(drawn)].tolist(), self._state.status[: len(drawn)].tolist()
        if len(drawn) == plan.num_rows and not self._wants_logprobs and status.count(OK) == len(drawn):
            return [RowResult((token,)) for token in tokens]
        results = [RowResult()] * plan.num_rows
        for r, b in enumerate(drawn.tolist()):
            pool_row = int(plan.pool_rows[b])
            if status[r] != OK:
                results[b] = RowResult(error=self._error(pool_row, status[r]))
            elif pool_row in self._wants_logprobs:
                results[b] = self._with_logprobs(r, tokens[r])
            else:
                results[b] = RowResult(tokens=(tokens[r],))
        return results

    def _with_logprobs(self, r: int, token: int) -> RowResult:
        row = self._state.logprobs(r)
        assert row is not None, "a row that asked for logprobs has none"
        return RowResult(tokens=(token,), logprobs=(token_logprob(token, *row),))

    def _error(self, pool_row: int, status: int) -> str:
        index = self._state.outputs(pool_row)
        if status == NOT_FINITE:
            return f"the model gave no finite logits for output token {index} (NaN, +inf, or all -inf); this request was ended, others go on"
        return f"no token is left to draw for output token {index}: allowed_token_ids, min_tokens and logit_bias together mask the whole vocabulary"
