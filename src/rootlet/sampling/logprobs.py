"""Log-probabilities as clients see them: natural log of the raw distribution (before edits and temperature).

A value is float64, summed in a fixed order from float32 logits, so a cold and a warm run agree to the bit. An alternative of probability zero is
left out; a chosen or prompt token of probability zero gets `LOGPROB_FLOOR`, so that every reply is strict JSON.
`top_ids` holds the `top_n` best (lowest id on ties), then the ids asked for by `LogprobSpec.token_ids`, in their order.
"""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from rootlet.core.types import LOGPROB_FLOOR, TokenLogprob


def token_logprob(token: int, logprob: float, ids: list[int], values: list[float]) -> TokenLogprob:
    """One position's answer from raw numbers."""
    pairs = [(i, v) for i, v in zip(ids, values, strict=True) if v > -math.inf]
    return TokenLogprob(token, max(logprob, LOGPROB_FLOOR), tuple(i for i, _ in pairs), tuple(v for _, v in pairs))


def raw_logprobs(logits: Tensor, targets: Tensor, top_n: int, *, native: bool | None = None) -> list[TokenLogprob]:
    """logits float32 [R, V], targets int [R] -> the logprob of each target with `top_n` alternatives; any number of rows.

    A row without a softmax (NaN, +inf, nothing finite) gives `logprob` None and no alternatives. `native` None = use the native library if built.
    """
    rows = _implementation(native).raw_logprobs(logits, targets, top_n)
    tokens = targets.tolist()
    return [TokenLogprob(t, None) if row is None else token_logprob(t, *row) for t, row in zip(tokens, rows, strict=True)]


def _implementation(native: bool | None) -> ModuleType:
    from rootlet.kernels import reference_sampling
    from rootlet.kernels.cpu import sample_ops

    return sample_ops if native or (native is None and sample_ops.available()) else reference_sampling
