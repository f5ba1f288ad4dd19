"""The native draw: hands compiled rows and logits to the library. Same tokens and the same logprob bits as `kernels.reference_sampling`.

Owns the static host buffers that the library writes (`relay`, `tokens`, `status`); the library owns row states.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rootlet.kernels import workspace
from rootlet.kernels.reference_sampling import OK, SampleRow

I32 = npt.NDArray[np.int32]


def available() -> bool:
    """True when the native library was built."""
    return importlib.util.find_spec("rootlet.kernels.cpu._native") is not None


def _check_logits(logits: Tensor) -> None:
    fits = logits.dtype == torch.float32 and logits.dim() == 2 and logits.stride(1) == 1
    assert fits, f"logits must be float32 rows, got {logits.dtype} with strides {logits.stride()}"


class NativeSampleState:
    """Satisfies `sampling.sampler.SampleState`. The library keeps the addresses of `relay`, `tokens` and `status`: never replace them."""

    __slots__ = ("_state", "relay", "status", "tokens", "vocab_size")

    def __init__(self, max_rows: int, vocab_size: int, max_logit_rows: int) -> None:
        from rootlet.kernels.cpu import _native

        self.vocab_size = vocab_size
        self.relay: I32 = np.zeros(max_rows + 1, np.int32)
        self.tokens: I32 = np.zeros(max_logit_rows, np.int32)
        self.status: I32 = np.zeros(max_logit_rows, np.int32)
        self._state = _native.SamplerState(
            max_rows, vocab_size, max_logit_rows, self.relay.ctypes.data, self.tokens.ctypes.data, self.status.ctypes.data
        )

    def init_row(self, row: SampleRow) -> None:
        """(Re)build a pool row; whatever it held is forgotten."""
        self._state.init_row(row.pool_row, _to_native(row))

    def begin(self, pool_rows: I32) -> None:
        """Logit row r of the next `sample` belongs to pool_rows[r]."""
        self._state.begin(pool_rows)

    def sample(self, logits: Tensor) -> None:
        """logits float32 [>= R, V], rows contiguous; edits change them in place. Records itself under capture."""
        from rootlet.kernels.cpu import _native

        _check_logits(logits)
        assert logits.shape[1] == self.vocab_size, f"logits over {logits.shape[1]} ids, the sampler has {self.vocab_size}"
        record = workspace.current()
        if record is not None:
            record.keep(logits, self)
        _native.sample(workspace.current_tape(), self._state, logits.data_ptr(), logits.stride(0))

    def outputs(self, pool_row: int) -> int:
        """How many tokens this row has drawn, those before a retraction included."""
        return int(self._state.outputs(pool_row))

    def logprobs(self, r: int) -> tuple[float, list[int], list[float]] | None:
        """(logprob of the token, ids, their logprobs) of logit row r, or None when not asked for."""
        found: tuple[float, list[int], list[float]] | None = self._state.logprobs(r)
        return found


def _to_native(row: SampleRow) -> Any:
    from rootlet.kernels.cpu import _native

    out = _native.SampleRow()
    out.seed, out.choice_index, out.drawn = row.seed, row.choice_index, row.drawn
    out.greedy, out.temperature = int(row.greedy), row.temperature
    out.top_k, out.top_p, out.min_p = row.top_k, row.top_p, row.min_p
    out.min_new_tokens, out.top_n = row.min_new_tokens, row.top_n
    out.has_penalties = int(row.has_penalties)
    out.repetition, out.frequency, out.presence = row.repetition, row.frequency, row.presence
    out.set_stop(row.stop_ids)
    out.set_bias(row.bias_ids, row.bias_values)
    out.set_counts(row.count_ids, row.count_out)
    out.set_extra(row.extra_ids)
    if row.allowed_ids is not None:
        out.set_allowed(row.allowed_ids)
    return out


def sample(logits: Tensor, state: NativeSampleState) -> None:
    """The op `sample` of the kernel table."""
    state.sample(logits)


def raw_logprobs(logits: Tensor, targets: Tensor, top_n: int) -> list[tuple[float, list[int], list[float]] | None]:
    """logits float32 [R, V], targets int [R] -> one entry a row; None where the row has no softmax. Runs at once, on the team."""
    from rootlet.kernels.cpu import _native

    rows, vocab = logits.shape
    _check_logits(logits)
    assert targets.shape[0] == rows, f"{targets.shape[0]} targets for {rows} rows"
    top_n = min(top_n, vocab)
    ids = targets.to(torch.int32).contiguous()
    assert rows == 0 or (int(ids.min()) >= 0 and int(ids.max()) < vocab), "a target lies outside the vocabulary"
    status, logprob = np.zeros(rows, np.int32), np.zeros(rows)
    top_ids, top_values = np.zeros((rows, top_n), np.int32), np.zeros((rows, top_n))
    _native.raw_logprobs(
        logits.data_ptr(), logits.stride(0), rows, vocab, top_n, ids.data_ptr(),
        status.ctypes.data, logprob.ctypes.data, top_ids.ctypes.data, top_values.ctypes.data,
    )  # fmt: skip
    answers = zip(status.tolist(), logprob.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    return [(value, best, values) if ok == OK else None for ok, value, best, values in answers]
