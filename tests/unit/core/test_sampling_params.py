"""The one check of sampling parameters: each limit from both sides, by its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rootlet.core.errors import InvalidValue
from rootlet.core.sampling_params import SamplingParams, validate

VOCAB, MAX_N = 32, 4


def check(**fields: Any) -> None:
    validate(SamplingParams(**fields), VOCAB, max_n=MAX_N)


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("temperature", [0.0, 5e-324, 1e30], [-5e-324, 1.1e30, math.nan, math.inf]),
    ("top_p", [5e-324, 1.0], [0.0, -0.1, 1.0000001, math.nan]),
    ("min_p", [0.0, 1.0], [-0.1, 1.0000001, math.nan]),
    ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
    ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1, -math.inf]),
    ("repetition_penalty", [5e-324, 10.0], [0.0, -1.0, 10.1, math.nan]),
    ("top_k", [-1, 0, 1, 2**62], [-2, -(2**62)]),
    ("n", [1, MAX_N], [0, MAX_N + 1, -1]),
    ("seed", [None, 0, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 2**64]),
    ("stop", [(), ("x",) * 32], [("x",) * 33]),
    ("stop_token_ids", [(), (0, VOCAB - 1)], [(VOCAB,), (-1,), (0, 2**40)]),
    ("allowed_token_ids", [None, (VOCAB - 1,)], [(VOCAB,), (-1,), ()]),
    ("choice_index", [0, 2**30], [-1, 2**30 + 1, 2**70]),
    ("logit_bias", [{}, {0: -100.0, VOCAB - 1: 100.0}], [{VOCAB: 0.0}, {-1: 0.0}, {0: 100.1}, {0: math.nan}, {0: -math.inf}]),
])  # fmt: skip
def test_each_limit_from_both_sides(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(**{name: value})
    for value in bad:
        with pytest.raises(InvalidValue, match=name) as error:
            check(**{name: value})
        assert error.value.param == name


def test_lengths_are_checked_together() -> None:
    for good in ({"max_new_tokens": 0}, {"max_new_tokens": 3, "min_new_tokens": 3}, {"min_new_tokens": 9}):
        check(**good)
    for bad, param in (
        ({"max_new_tokens": -1}, "max_tokens"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_tokens"),
        ({"min_new_tokens": -1}, "min_tokens"),
    ):
        with pytest.raises(InvalidValue) as error:
            check(**bad)
        assert error.value.param == param


def test_a_dialect_may_bound_the_temperature() -> None:
    validate(SamplingParams(temperature=2.0), VOCAB, max_n=1, max_temperature=2.0)
    with pytest.raises(InvalidValue, match=r"temperature must be in \[0, 2\], got 2.01"):
        validate(SamplingParams(temperature=2.01), VOCAB, max_n=1, max_temperature=2.0)


def test_greedy_begins_below_its_limit() -> None:
    assert [SamplingParams(temperature=t).is_greedy for t in (0.0, 9.99e-6, 1e-5)] == [True, True, False]
