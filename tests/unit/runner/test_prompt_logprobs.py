"""Which positions each chunk yields, and from which hidden row (core/step.py, `RowResult`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import RowInit, RowResult, StepPlan
from rootlet.core.types import ForwardMode, LogprobSpec
from rootlet.runner.prompt_logprobs import BLOCK_ROWS, PromptLogprobs

VOCAB = 300


def head(hidden: Tensor, rows: Tensor) -> Tensor:
    """Row r's logits: 5.0 at token `hidden[r]`, else 0; so its best alternative names the hidden row it came from."""
    out = torch.zeros(len(rows), VOCAB)
    out[torch.arange(len(rows)), hidden[rows.long(), 0].long()] = 5.0
    return out


def init(pool_row: int, prompt_len: int, start: int | None) -> RowInit:
    spec = None if start is None else LogprobSpec(top_n=1, prompt_start=start)
    return RowInit(pool_row, "r", SamplingParams(), (), np.arange(100, 100 + prompt_len, dtype=np.int32), np.empty(0, np.int32), spec)


def plan(rows: list[tuple[int, int, int]]) -> StepPlan:
    """rows: (pool row, first position, count)."""
    total = sum(n for _, _, n in rows)
    i32 = lambda x: np.asarray(x, np.int32)  # noqa: E731
    return StepPlan(
        step=1,
        mode=ForwardMode.EXTEND,
        rids=tuple(str(r) for r, _, _ in rows),
        epochs=i32([0] * len(rows)),
        pool_rows=i32([r for r, _, _ in rows]),
        prefix_lens=i32([a for _, a, _ in rows]),
        extend_lens=i32([n for _, _, n in rows]),
        sample=np.ones(len(rows), np.bool_),
        input_ids=i32([0] * total),
        positions=i32([0] * total),
        out_cache_loc=i32([0] * total),
    )


def entries(chunks: list[tuple[int, int]], *, prompt_len: int, start: int) -> list[tuple[int, int]]:
    """(token, hidden row's mark) of all entries that the chunks (first position, count) of one row yield."""
    logprobs = PromptLogprobs(head, native=False)
    logprobs.init_row(init(1, prompt_len, start))
    out: list[tuple[int, int]] = []
    for a, n in chunks:
        rows = [RowResult(tokens=(7,))]
        logprobs.add(plan([(1, a, n)]), torch.arange(a, a + n, dtype=torch.float32).unsqueeze(1), rows)
        assert rows[0].tokens == (7,)
        out += [(e.token_id, e.top_ids[0]) for e in rows[0].prompt_logprobs]
    return out


@pytest.mark.parametrize("chunks", [[(0, 10)], [(0, 4), (4, 6)], [(0, 1), (1, 8), (9, 1)], [(0, 9), (9, 1), (10, 1), (11, 1)]])
def test_each_position_is_predicted_by_the_one_before(chunks: list[tuple[int, int]]) -> None:
    assert entries(chunks, prompt_len=10, start=0) == [(100 + p, p - 1) for p in range(1, 10)]


def test_start_and_a_cached_prefix() -> None:
    assert entries([(0, 10)], prompt_len=10, start=7) == [(107, 6), (108, 7), (109, 8)]
    assert entries([(6, 4)], prompt_len=10, start=7) == [(107, 6), (108, 7), (109, 8)]


def test_long_prompts_go_through_the_head_in_blocks() -> None:
    n = 2 * BLOCK_ROWS + 5
    assert entries([(0, n)], prompt_len=n, start=0) == [(100 + p, p - 1) for p in range(1, n)]


def test_neighbours_and_rebuilt_rows_get_nothing() -> None:
    logprobs = PromptLogprobs(head, native=False)
    logprobs.init_row(init(1, 5, None))
    logprobs.init_row(init(2, 5, 0))
    rows = [RowResult(), RowResult()]
    hidden = torch.arange(10, dtype=torch.float32).unsqueeze(1)
    logprobs.add(plan([(1, 0, 5), (2, 0, 5)]), hidden, rows)
    assert rows[0].prompt_logprobs == ()
    assert [(e.token_id, e.top_ids[0]) for e in rows[1].prompt_logprobs] == [(101, 5), (102, 6), (103, 7), (104, 8)]
    logprobs.init_row(init(2, 5, None))
    rows = [RowResult()]
    logprobs.add(plan([(2, 0, 5)]), hidden, rows)
    assert rows[0].prompt_logprobs == ()
