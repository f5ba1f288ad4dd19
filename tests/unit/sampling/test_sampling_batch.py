"""Compiling a row: what no sampler may ever see is dropped, and penalties start from exact counts."""

from __future__ import annotations

import numpy as np

from fixtures.sampling_cases import row_init, step_plan
from rootlet.core.sampling_params import SamplingParams
from rootlet.sampling.batch import compile_row, sampled_rows
from rootlet.sampling.penalties import seed_counts


def test_ids_outside_the_vocabulary_never_reach_a_sampler() -> None:
    params = SamplingParams(logit_bias={-1: 1.0, 0: 2.0, 9: 3.0, 10: 4.0}, allowed_token_ids=(3, 3, 10), repetition_penalty=2.0)
    row = compile_row(row_init(1, params, stop_ids=(2, 10, -4, 2**31), prompt_ids=[1, 11], output_ids=[9, 9]), vocab_size=10)
    assert row.stop_ids.tolist() == [2]
    assert dict(zip(row.bias_ids.tolist(), row.bias_values.tolist(), strict=True)) == {0: 2.0, 9: 3.0}
    assert row.allowed_ids is not None
    assert row.allowed_ids.tolist() == [3]
    assert dict(zip(row.count_ids.tolist(), row.count_out.tolist(), strict=True)) == {1: 0, 9: 2}


def test_a_row_without_penalties_keeps_no_counts() -> None:
    assert len(compile_row(row_init(1, SamplingParams(), prompt_ids=[1, 2]), vocab_size=10).count_ids) == 0


def test_seeds_wrap_to_64_bits_and_no_seed_is_zero() -> None:
    assert compile_row(row_init(1, SamplingParams(seed=-1)), vocab_size=10).seed == 2**64 - 1
    assert compile_row(row_init(1, SamplingParams()), vocab_size=10).seed == 0


def test_counts_split_prompt_and_output() -> None:
    ids, drawn = seed_counts(np.array([5, 7, 5], np.int32), np.array([7, 9, 9], np.int32))
    assert (ids.tolist(), drawn.tolist()) == ([5, 7, 9], [0, 1, 2])
    ids, drawn = seed_counts(np.empty(0, np.int32), np.empty(0, np.int32))
    assert (ids.tolist(), drawn.tolist()) == ([], [])


def test_sampled_rows_keep_the_plan_order() -> None:
    assert sampled_rows(step_plan([4, 2, 9], sample=[True, False, True])).tolist() == [4, 9]
