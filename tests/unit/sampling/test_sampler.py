"""The sampler against closed forms: edits, filters, the draw's distribution, errors that stay with their row, and the relay."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.sampling_cases import row_init, step_plan
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import RELAY, RowResult
from rootlet.core.types import LogprobSpec, TokenLogprob
from rootlet.kernels.reference_sampling import exp64, gumbel, log64, noise_key
from rootlet.sampling.logprobs import raw_logprobs
from rootlet.sampling.sampler import Sampler

HAS_NATIVE = importlib.util.find_spec("rootlet.kernels.cpu._native") is not None
V = 32


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.skipif(not HAS_NATIVE, reason="the native library is not built"))])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Row:
    """One pool row over a small vocabulary."""

    def __init__(self, native: bool, vocab: int = V, **kwargs: Any) -> None:
        init = {k: kwargs.pop(k) for k in ("stop_ids", "prompt_ids", "output_ids", "logprobs") if k in kwargs}
        self.sampler = Sampler(max_rows=4, vocab_size=vocab, max_logit_rows=4, native=native)
        self.sampler.init_row(row_init(2, SamplingParams(**kwargs), **init))

    def result(self, logits: Any) -> RowResult:
        plan = step_plan([2])
        self.sampler.prepare(plan)
        self.sampler.sample(torch.as_tensor(logits, dtype=torch.float32).reshape(1, -1).clone())
        return self.sampler.collect(plan)[0]

    def draw(self, logits: Any) -> int:
        (token,) = self.result(logits).tokens
        return token


def peaked(*pairs: tuple[int, float], base: float = 0.0) -> torch.Tensor:
    x = torch.full((V,), float(base))
    for i, value in pairs:
        x[i] = value
    return x


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12, 9.9e-6])
def test_below_the_greedy_limit_the_argmax_is_drawn_lowest_id_first(native: bool, temperature: float) -> None:
    assert Row(native, temperature=temperature, seed=1).draw(peaked((7, 3.0), (9, 3.0))) == 7


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 6.5e4, 1e38])
def test_tiny_temperatures_stay_finite_and_follow_the_argmax(native: bool, temperature: float, scale: float) -> None:
    row = Row(native, temperature=temperature, seed=1, logprobs=LogprobSpec(top_n=2))
    got = row.result(peaked((7, 1.0), base=-1.0) * scale)
    assert got.tokens == (7,)
    assert got.logprobs[0].logprob is not None
    assert -1e39 < got.logprobs[0].logprob <= 0


@pytest.mark.parametrize("top_k", [0, -1, V - 1, V, V + 1, 12_345_678, 2**31, 2**40])
def test_a_top_k_at_or_above_the_vocabulary_is_off(native: bool, top_k: int) -> None:
    logits = torch.linspace(0, 1, V)
    drawn = {Row(native, temperature=1.0, seed=s, top_k=top_k).draw(logits) for s in range(400)}
    assert drawn == set(range(1, V)) if top_k == V - 1 else drawn == set(range(V))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}])
def test_the_narrowest_filters_leave_the_argmax_at_any_temperature(native: bool, filters: dict[str, Any]) -> None:
    for seed in range(20):
        assert Row(native, temperature=1e6, seed=seed, **filters).draw(peaked((5, 1.0))) == 5


def test_a_huge_temperature_alone_is_nearly_uniform(native: bool) -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 10
    assert len({Row(native, 400, temperature=1e6, seed=s).draw(logits) for s in range(300)}) > 100


def support_of(native: bool, logits: torch.Tensor, **params: Any) -> set[int]:
    return {Row(native, len(logits), temperature=1.0, seed=s, **params).draw(logits) for s in range(250)}


def test_filters_apply_in_order_each_on_the_rest(native: bool) -> None:
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = p.log()
    assert support_of(native, logits, top_k=3) == {0, 1, 2}
    assert support_of(native, logits, top_p=0.69) == {0, 1}
    assert support_of(native, logits, top_p=0.71) == {0, 1, 2}
    # of the two best, 0.4 / 0.7 = 0.571 reaches 0.55; of all, 0.4 does not
    assert support_of(native, logits, top_k=2, top_p=0.55) == {0}
    assert support_of(native, logits, top_p=0.55) == {0, 1}
    assert support_of(native, logits, min_p=0.3) == {0, 1, 2}
    assert support_of(native, logits, min_p=0.3, top_k=2) == {0, 1}
    assert support_of(native, torch.zeros(5), top_k=2) == {0, 1}


def test_penalties_follow_their_formulas(native: bool) -> None:
    """Differences of two logits decide greedily; each case sits just on one side of the closed form."""
    prompt, output = [3], [4, 4, 5]
    seen = {"prompt_ids": prompt, "output_ids": output}
    for delta, want in ((-0.01, 4), (0.01, 0)):  # 4 was drawn twice: 10 - 2 * 0.5 - 0.25 = 8.75
        row = Row(native, temperature=0, frequency_penalty=0.5, presence_penalty=0.25, **seen)
        assert row.draw(peaked((4, 10.0), (0, 8.75 + delta))) == want
    for delta, want in ((-0.01, 3), (0.01, 0)):  # the prompt counts for repetition only: 10 / 2 = 5
        assert Row(native, temperature=0, repetition_penalty=2.0, **seen).draw(peaked((3, 10.0), (0, 5 + delta))) == want
    assert Row(native, temperature=0, presence_penalty=2.0, frequency_penalty=2.0, **seen).draw(peaked((3, 1.0))) == 3
    for delta, want in ((-0.01, 3), (0.01, 0)):  # negative logits are multiplied: -1 * 2 = -2
        row = Row(native, temperature=0, repetition_penalty=2.0, **seen)
        assert row.draw(peaked((3, -1.0), (0, -2 + delta), base=-50)) == want
    for delta, want in ((-0.01, 4), (0.01, 0)):  # repetition first, then frequency: 10 / 2 - 2 * 1 = 3
        assert Row(native, temperature=0, repetition_penalty=2.0, frequency_penalty=1.0, **seen).draw(peaked((4, 10.0), (0, 3 + delta))) == want


def test_counts_grow_with_each_draw_and_restart_with_the_row(native: bool) -> None:
    row = Row(native, temperature=0, frequency_penalty=1.0)
    logits = peaked((1, 2.5), (2, 2.0), (3, 1.0))
    drawn = [row.draw(logits) for _ in range(5)]
    assert drawn == [1, 2, 1, 2, 3]  # 2.5 2.0 1.5 1.0 then 1: 0.5, 2: 0.0, 3: 1.0
    row.sampler.init_row(row_init(2, SamplingParams(temperature=0, frequency_penalty=1.0)))
    assert row.draw(logits) == 1
    row.sampler.init_row(row_init(2, SamplingParams(temperature=0, frequency_penalty=1.0), output_ids=drawn[:3]))
    assert row.draw(logits) == 2


def test_stop_ids_are_masked_until_min_tokens(native: bool) -> None:
    row = Row(native, temperature=0, min_new_tokens=3, stop_ids=(6, 8, 99), output_ids=[0])
    logits = peaked((6, 9.0), (8, 8.0), (1, 1.0))
    assert [row.draw(logits) for _ in range(3)] == [1, 1, 6]


def test_logit_bias_bans_and_forces_in_each_position(native: bool) -> None:
    ban = Row(native, temperature=1.0, seed=3, logit_bias={4: -100.0})
    assert 4 not in [ban.draw(peaked((4, 5.0))) for _ in range(40)]
    force = Row(native, temperature=1.0, seed=3, logit_bias={9: 100.0})
    assert [force.draw(peaked((4, 20.0))) for _ in range(20)] == [9] * 20


def test_only_allowed_ids_are_drawn(native: bool) -> None:
    row = Row(native, temperature=1.0, seed=0, allowed_token_ids=(3, 30), logit_bias={5: 100.0})
    assert {row.draw(peaked((7, 50.0))) for _ in range(60)} == {3, 30, 5} - {5}


@pytest.mark.parametrize("bad", [[float("nan")], [float("inf")]])
def test_a_bad_row_fails_alone_and_names_its_output(native: bool, bad: list[float]) -> None:
    s = Sampler(max_rows=4, vocab_size=V, max_logit_rows=4, native=native)
    for p in (1, 2, 3):
        s.init_row(row_init(p, SamplingParams(temperature=0), output_ids=[1, 1]))
    logits = peaked((7, 1.0)).repeat(3, 1)
    logits[1, 20] = bad[0]
    plan = step_plan([1, 2, 3])
    s.prepare(plan)
    s.sample(logits)
    first, failed, last = s.collect(plan)
    assert first == last == RowResult(tokens=(7,))
    assert failed.tokens == ()
    assert "output token 2" in str(failed.error)
    assert s.relay.tolist() == [0, 7, 0, 7, 0]


def test_rows_without_any_possible_token_fail(native: bool) -> None:
    all_masked = Row(native, temperature=1.0, seed=0).result(torch.full((V,), -math.inf))
    assert "no finite logits" in str(all_masked.error)
    contradiction = Row(native, temperature=0, allowed_token_ids=(6,), stop_ids=(6,), min_new_tokens=1).result(torch.zeros(V))
    assert "no token is left" in str(contradiction.error)
    assert Row(native, temperature=0, allowed_token_ids=()).result(torch.zeros(V)).error is not None


@pytest.mark.parametrize("params", [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.2}, {"temperature": 2.0}])
def test_the_draw_has_the_right_distribution(native: bool, params: dict[str, Any]) -> None:
    """Chi-square over outputs of one seeded row; the bound is far beyond the 99.99 % quantile for at most 9 degrees of freedom."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 0.2, 0.1, 1.2])
    t, n = params.get("temperature", 1.0), 12_000
    p = torch.softmax(logits.double() / t, dim=0).numpy()
    order = np.argsort(-p)
    if "top_k" in params:
        p[order[6:]] = 0
    if "top_p" in params:
        p[order[np.cumsum(p[order]) - p[order] >= 0.9]] = 0
    if "min_p" in params:
        p[p < 0.2 * p.max()] = 0
    p /= p.sum()
    row = Row(native, len(p), seed=11, **({"temperature": 1.0} | params))
    counts = np.bincount([row.draw(logits) for _ in range(n // 2 if native else n // 6)], minlength=len(p))
    live = p > 0
    assert counts[~live].sum() == 0
    expected = p[live] * counts.sum()
    assert ((counts[live] - expected) ** 2 / expected).sum() < 34


def test_seeds_repeat_and_choices_differ(native: bool) -> None:
    logits = torch.zeros(V)

    def stream(**kwargs: Any) -> list[int]:
        row = Row(native, temperature=1.0, **kwargs)
        return [row.draw(logits) for _ in range(24)]

    assert stream(seed=5) == stream(seed=5, choice_index=0)
    others = [stream(seed=5, choice_index=1), stream(seed=6), stream(seed=-5), stream(seed=2**62)]
    assert len({tuple(x) for x in [stream(seed=5), *others]}) == 5
    resumed = Row(native, temperature=1.0, seed=5, output_ids=stream(seed=5)[:10])
    assert [resumed.draw(logits) for _ in range(14)] == stream(seed=5)[10:]


def test_logprobs_are_those_of_the_raw_distribution(native: bool) -> None:
    logits = peaked((3, 4.0), (5, 3.0), (6, 3.0), (9, -math.inf))
    row = Row(native, temperature=1.0, seed=1, top_k=1, logit_bias={3: -100.0}, logprobs=LogprobSpec(top_n=3, token_ids=(0, 9)))
    (got,) = row.result(logits).logprobs
    truth = torch.log_softmax(logits.double(), 0)
    assert got.token_id == 5
    assert got.logprob == pytest.approx(float(truth[5]), abs=1e-12)
    assert got.top_ids == (3, 5, 6, 0)  # ties by id, then the asked id; the impossible one is left out
    assert got.top_logprobs == pytest.approx([float(truth[i]) for i in (3, 5, 6, 0)], abs=1e-12)
    plain = Row(native, temperature=0.0, logprobs=LogprobSpec()).result(logits).logprobs[0]
    assert (plain.token_id, plain.top_ids) == (3, ())
    forced = Row(native, temperature=0.0, allowed_token_ids=(0,), logprobs=LogprobSpec(top_n=V)).result(logits).logprobs[0]
    assert forced.logprob == pytest.approx(float(truth[0]), abs=1e-12)
    assert len(forced.top_ids) == V - 1


def test_logprobs_of_rows_that_have_none(native: bool) -> None:
    """A prompt token of probability zero gets the documented floor, an impossible alternative is left out, a row without a softmax has nothing."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[0.0, -inf, 0.0], [0.0, nan, 0.0], [0.0, inf, 0.0], [-inf, -inf, -inf]])
    zero, *rest = raw_logprobs(logits, torch.tensor([1, 0, 0, 0]), 3, native=native)
    assert (zero.token_id, zero.logprob, zero.top_ids) == (1, -9999.0, (0, 2))
    assert zero.top_logprobs == pytest.approx((-math.log(2),) * 2, abs=1e-15)
    assert rest == [TokenLogprob(0, None)] * 3


def test_only_sampling_rows_draw_and_the_relay_feeds_the_next_step(native: bool) -> None:
    s = Sampler(max_rows=5, vocab_size=V, max_logit_rows=4, native=native)
    for p in (1, 3, 5):
        s.init_row(row_init(p, SamplingParams(temperature=0)))
    plan = step_plan([5, 1, 3], sample=[True, False, True], extend_lens=[2, 3, 1])
    s.prepare(plan)
    s.sample(torch.stack((peaked((11, 1.0)), peaked((13, 1.0)))))
    assert s.collect(plan) == [RowResult(tokens=(11,)), RowResult(), RowResult(tokens=(13,))]
    ids = np.full(8, 77, np.int32)
    mixed = step_plan([1, 3, 5], extend_lens=[2, 1, 1], input_ids=[20, 21, RELAY, RELAY])
    s.gather_input_ids(mixed, ids)
    assert ids.tolist() == [20, 21, 13, 11, 77, 77, 77, 77]
    assert mixed.input_ids.tolist() == [20, 21, RELAY, RELAY]


def test_exp_and_log_are_accurate_to_an_ulp() -> None:
    x = -np.concatenate(([0.0], np.logspace(-18, np.log10(707), 5000)))
    assert np.max(np.abs(exp64(x) - np.exp(x)) / np.exp(x)) < 4.5e-16
    assert exp64(np.array([0.0, -np.inf, -709.0])).tolist() == [1.0, 0.0, 0.0]
    y = np.concatenate((np.logspace(-300, 300, 5000), 1 - np.logspace(-16, -1, 500)))
    assert np.max(np.abs(log64(y) - np.log(y)) / np.abs(np.log(y))) < 4.5e-16


def test_the_noise_is_gumbel() -> None:
    g = gumbel(noise_key(1, 0, 0), np.arange(200_000))
    assert abs(g.mean() - 0.5772156649) < 0.01
    assert abs(g.var() - math.pi**2 / 6) < 0.03
    assert np.isfinite(g).all()
    assert abs(np.corrcoef(g[:-1], g[1:])[0, 1]) < 0.01
