"""Runs two throw-away steps before the first request: first-touch of buffers, thread start, lazy initialisation. Everything is written to page 0 and
pool row 0, the padding that no request ever reads."""

from __future__ import annotations

import numpy as np

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import Capacity, RowInit, StepPlan
from rootlet.core.types import ForwardMode
from rootlet.runner.model_runner import ModelRunner

WARMUP_TOKENS = 32


def _plan(capacity: Capacity, *, prefix: int, count: int) -> StepPlan:
    """Row 0 computes [prefix, prefix + count) in the sink page and draws."""
    none = np.empty(0, np.int32)
    positions = np.arange(prefix, prefix + count, dtype=np.int32)
    return StepPlan(
        step=0,
        mode=ForwardMode.DECODE if count == 1 else ForwardMode.EXTEND,
        rids=("warmup",),
        epochs=np.zeros(1, np.int32),
        pool_rows=np.zeros(1, np.int32),
        prefix_lens=np.array([prefix], np.int32),
        extend_lens=np.array([count], np.int32),
        sample=np.ones(1, np.bool_),
        input_ids=np.zeros(count, np.int32),
        positions=positions,
        out_cache_loc=positions % capacity.page_size,
        row_inits=() if prefix else (RowInit(0, "warmup", SamplingParams(temperature=0.0), (), none, none),),
    )


def warm_up(runner: ModelRunner) -> float:
    """Seconds of the decode step."""
    count = min(WARMUP_TOKENS, runner.capacity.max_context_len - 1, runner.capacity.max_step_tokens)
    runner.run(_plan(runner.capacity, prefix=0, count=count))
    return runner.run(_plan(runner.capacity, prefix=count, count=1)).forward_s
