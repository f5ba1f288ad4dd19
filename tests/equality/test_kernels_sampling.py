"""The native draw equals the reference draw: tokens exactly, logprobs to the bit, in every instruction set, batch and number of threads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.sampling_cases import row_init, step_plan
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import RowInit, RowResult
from rootlet.core.types import LogprobSpec
from rootlet.sampling.logprobs import raw_logprobs
from rootlet.sampling.sampler import Sampler

HAS_NATIVE = importlib.util.find_spec("rootlet.kernels.cpu._native") is not None
pytestmark = pytest.mark.skipif(not HAS_NATIVE, reason="the native library is not built")

VOCAB = 1003


@pytest.fixture(autouse=True)
def native_guard() -> Iterator[ModuleType]:
    from rootlet.kernels.cpu import _native

    yield _native
    _native.force_isa("auto")
    _native.set_team(1, False)


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mix of features, edges included."""
    pick = rng.choice
    some = tuple(int(i) for i in rng.choice(VOCAB, 12, replace=False))
    kwargs: dict[str, Any] = {
        "temperature": float(pick([0.0, 1e-5, 1e-3, 0.1, 0.7, 1.0, 1.7, 1e6])),
        "top_k": int(pick([0, -1, 1, 2, 40, 200, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1])),
        "top_p": float(pick([1.0, 0.999999, 0.95, 0.5, 0.01, 1e-9])),
        "min_p": float(pick([0.0, 0.0, 0.05, 0.5, 1.0])),
        "seed": int(rng.integers(-(2**63), 2**63 - 1)),
        "choice_index": int(rng.integers(0, 4)),
    }
    if rng.random() < 0.4:
        kwargs |= {"presence_penalty": float(pick([-2, 0, 0.7])), "frequency_penalty": float(pick([-0.5, 0, 2]))}
        kwargs |= {"repetition_penalty": float(pick([0.5, 1.0, 1.3, 10.0, 1e-300]))}
    if rng.random() < 0.3:
        kwargs |= {"logit_bias": {i: float(pick([-100, -1, 3, 100])) for i in some[:5]}}
    if rng.random() < 0.15:
        kwargs |= {"allowed_token_ids": some}
    if rng.random() < 0.3:
        kwargs |= {"min_new_tokens": 3, "max_new_tokens": 9}
    return SamplingParams(**kwargs)


def random_logits(rng: np.random.Generator, rows: int, vocab: int = VOCAB) -> torch.Tensor:
    x = rng.normal(size=(rows, vocab)) * rng.choice([0.01, 1.0, 5.0, 40.0], size=(rows, 1))
    if rng.random() < 0.3:
        x = np.round(x)  # many ties
    x[rng.random((rows, vocab)) < 0.02] = -np.inf
    return torch.from_numpy(x.astype(np.float32))


def sampler(native: bool, rows: int = 16, vocab: int = VOCAB) -> Sampler:
    return Sampler(max_rows=rows, vocab_size=vocab, max_logit_rows=rows, native=native)


def run(s: Sampler, inits: list[RowInit], steps: list[torch.Tensor], rows: list[int] | None = None) -> list[list[RowResult]]:
    """Draw len(steps) tokens a row; `rows` picks which inits take part, in that order."""
    chosen = list(range(len(inits))) if rows is None else rows
    for i in chosen:
        s.init_row(inits[i])
    out = []
    for logits in steps:
        plan = step_plan([inits[i].pool_row for i in chosen])
        s.prepare(plan)
        s.sample(logits[chosen].clone())
        out.append(s.collect(plan))
    return out


def cases(seed: int, rows: int = 16, count: int = 5) -> tuple[list[RowInit], list[torch.Tensor]]:
    rng = np.random.default_rng(seed)
    inits = [
        row_init(
            i + 1,
            random_params(rng),
            stop_ids=(1, 2, 5),
            prompt_ids=rng.integers(0, VOCAB, 20),
            output_ids=rng.integers(0, VOCAB, rng.integers(0, 3)),
            logprobs=LogprobSpec(top_n=int(rng.choice([0, 1, 20, 200]))) if rng.random() < 0.5 else None,
        )
        for i in range(rows)
    ]
    return inits, [random_logits(rng, rows) for _ in range(count)]


@pytest.mark.parametrize("seed", range(25))
def test_native_equals_reference_exactly(seed: int) -> None:
    inits, steps = cases(seed)
    assert run(sampler(True), inits, steps) == run(sampler(False), inits, steps)


@pytest.mark.parametrize("seed", range(3))
def test_instruction_sets_agree(seed: int, native_guard: ModuleType) -> None:
    inits, steps = cases(seed + 100)
    results = []
    for isa in native_guard.usable_isas().split(","):
        native_guard.force_isa(isa)
        results.append(run(sampler(True), inits, steps))
    assert all(r == results[0] for r in results)


@pytest.mark.parametrize("native", [True, False])
def test_a_row_draws_the_same_alone_in_any_batch_and_on_two_threads(native: bool, native_guard: ModuleType) -> None:
    inits, steps = cases(7)
    together = run(sampler(native), inits, steps)
    for i in range(len(inits)):
        assert [r[0] for r in run(sampler(native), inits, steps, [i])] == [r[i] for r in together]
    native_guard.set_team(2, False)
    order = np.random.default_rng(0).permutation(len(inits)).tolist()
    for alone, shuffled in zip(together, run(sampler(native), inits, steps, order), strict=True):
        assert [alone[i] for i in order] == shuffled


@pytest.mark.parametrize("native", [True, False])
def test_a_retracted_row_goes_on_as_if_it_had_not_been(native: bool) -> None:
    inits, steps = cases(11, count=6)
    whole = run(sampler(native), inits, steps)
    rebuilt = []
    for i, init in enumerate(inits):
        drawn = [t for step in whole[:3] for t in step[i].tokens]
        rebuilt.append(RowInit(17 - init.pool_row, init.rid, init.params, init.stop_ids, init.prompt_ids,
                               np.concatenate((init.output_ids, drawn)).astype(np.int32), init.logprobs))  # fmt: skip
    ok = [i for i in range(len(inits)) if all(step[i].error is None for step in whole)]
    again = run(sampler(native), rebuilt, steps[3:], ok)
    assert len(ok) > 8
    assert [[step[i] for i in ok] for step in whole[3:]] == again


def test_a_flat_distribution_over_a_large_vocabulary() -> None:
    """The nucleus needs most of the vocabulary: the partial selection must grow to it."""
    vocab = 40_000
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(4, vocab)).astype(np.float32))
    logits[1, ::3] = -torch.inf
    logits[2] = 1.0
    settings = [
        [{"temperature": 1e6, "top_p": 0.9}, {"top_p": 0.99}, {"temperature": 1e-3, "top_p": 0.5}, {"temperature": 3.0}],
        [{"temperature": 5.0, "top_p": 0.9999999}, {"temperature": 1e30, "top_p": 0.7}, {"top_p": 0.3}, {"top_k": 5000, "top_p": 0.9}],
    ]
    for kwargs in settings:
        inits = [row_init(i + 1, SamplingParams(seed=i, **kw)) for i, kw in enumerate(kwargs)]
        assert run(sampler(True, 4, vocab), inits, [logits] * 4) == run(sampler(False, 4, vocab), inits, [logits] * 4)


@pytest.mark.parametrize("top_n", [0, 1, 5, 130, 5000])
def test_raw_logprobs(top_n: int) -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 9)
    logits[3, 10] = float("nan")
    targets = torch.from_numpy(rng.integers(0, VOCAB, 9).astype(np.int32))
    native, reference = (raw_logprobs(logits, targets, top_n, native=n) for n in (True, False))
    assert native == reference
    truth = torch.log_softmax(logits.double(), dim=-1)
    for r, got in enumerate(native):
        if r == 3:
            assert (got.logprob, got.top_ids) == (None, ())
            continue
        assert got.logprob == pytest.approx(max(float(truth[r, targets[r]]), -9999.0), abs=1e-9)
        assert len(got.top_ids) == min(top_n, int(torch.isfinite(logits[r]).sum()))
        assert list(got.top_logprobs) == pytest.approx(truth[r].sort(descending=True).values[: len(got.top_ids)].tolist(), abs=1e-9)
    one_by_one = [raw_logprobs(logits[r : r + 1], targets[r : r + 1], top_n, native=True)[0] for r in range(9)]
    assert one_by_one == native


def test_a_captured_draw_replays_for_other_rows() -> None:
    from rootlet.kernels.cpu.table import NativeTable

    inits, steps = cases(21)
    want = run(sampler(True), inits, [steps[0]])[0]
    s = sampler(True)
    for init in inits:
        s.init_row(init)
    logits = torch.zeros(16, VOCAB)
    graph = NativeTable().new_graph()
    with graph.capture():
        s.sample(logits)
    for rows in ([3, 1, 2], [0, 9]):
        plan = step_plan([inits[i].pool_row for i in rows])
        s.prepare(plan)
        logits[: len(rows)] = steps[0][rows]
        graph.replay(num_tokens=len(rows), num_logit_rows=len(rows))
        assert s.collect(plan) == [want[i] for i in rows]
