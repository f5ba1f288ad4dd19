"""Compiles what a request asked for into the arrays a sampler works on, once per row, and finds the rows of a plan that draw.

Owns nothing. Ids outside the vocabulary were refused at the front (`validate`); those of `stop_ids` and `prompt_ids` that a padded or smaller
vocabulary does not have are dropped here, so that nothing can write outside a row of logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rootlet.core.step import RowInit, StepPlan
from rootlet.kernels.reference_sampling import SampleRow
from rootlet.sampling.penalties import seed_counts

I32 = npt.NDArray[np.int32]
_NONE = np.empty(0, np.int32)
_SEED_MASK = (1 << 64) - 1


def _ids(ids: npt.ArrayLike, vocab_size: int) -> I32:
    out = np.asarray(ids, dtype=np.int64).reshape(-1)
    return out[(out >= 0) & (out < vocab_size)].astype(np.int32)


def compile_row(init: RowInit, vocab_size: int) -> SampleRow:
    """The row's state at birth. An absent seed counts as 0 (the front draws one for each unseeded request)."""
    p = init.params
    counts = (_NONE, _NONE)
    if p.has_penalties:
        counts = seed_counts(_ids(init.prompt_ids, vocab_size), _ids(init.output_ids, vocab_size))
    bias_ids = np.fromiter(p.logit_bias, np.int64, len(p.logit_bias))
    bias = np.fromiter(p.logit_bias.values(), np.float32, len(p.logit_bias))
    inside = (bias_ids >= 0) & (bias_ids < vocab_size)
    want = init.logprobs
    return SampleRow(
        pool_row=init.pool_row,
        seed=(p.seed or 0) & _SEED_MASK,
        choice_index=p.choice_index,
        drawn=len(init.output_ids),
        temperature=p.temperature,
        greedy=p.is_greedy,
        top_k=p.top_k if 0 < p.top_k < vocab_size else 0,
        top_p=p.top_p,
        min_p=p.min_p,
        min_new_tokens=p.min_new_tokens,
        repetition=p.repetition_penalty,
        frequency=p.frequency_penalty,
        presence=p.presence_penalty,
        stop_ids=np.unique(_ids(init.stop_ids, vocab_size)),
        bias_ids=bias_ids[inside].astype(np.int32),
        bias_values=bias[inside],
        allowed_ids=None if p.allowed_token_ids is None else np.unique(_ids(p.allowed_token_ids, vocab_size)),
        count_ids=counts[0],
        count_out=counts[1],
        has_penalties=p.has_penalties,
        top_n=-1 if want is None else min(want.top_n, vocab_size),
        extra_ids=_NONE if want is None else _ids(want.token_ids, vocab_size),
    )


def sampled_rows(plan: StepPlan) -> I32:
    """Pool rows that draw in this step, in row order: logit row r belongs to the r-th of them."""
    rows: I32 = plan.pool_rows[plan.sample]
    return rows
