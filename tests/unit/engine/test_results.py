"""The Python API's values: sampling from dicts, prompts of every shape, chunks to results."""

from __future__ import annotations

from typing import Any

import pytest

from rootlet.core.errors import InvalidValue, RequestFailed, Unavailable
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Finish, FinishKind, TokenLogprob
from rootlet.engine.results import prompts_of, results_of, sampling_of
from rootlet.frontend.types import GenerateChunk


def test_sampling_from_a_dict_with_aliases_and_defaults() -> None:
    got = sampling_of({"max_tokens": 4, "stop": "x", "temperature": None}, {"temperature": 0.5, "top_p": 0.9})
    assert got == SamplingParams(max_new_tokens=4, stop=("x",), temperature=0.5, top_p=0.9)
    assert sampling_of(SamplingParams(n=2), {"temperature": 0.1}) == SamplingParams(n=2)
    assert sampling_of(None, {}) == SamplingParams()


@pytest.mark.parametrize("given", [{"temprature": 1}, {"temperature": "hot"}, {"max_tokens": 1.5}, {"stop": 3}])
def test_bad_sampling_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        sampling_of(given, {})


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("a", (["a"], False)),
        ([1, 2], ([(1, 2)], False)),
        (["a", "b"], (["a", "b"], True)),
        ([[1], [2, 3]], ([(1,), (2, 3)], True)),
        (["a"], (["a"], True)),
    ],
)
def test_prompt_shapes(prompt: Any, want: Any) -> None:
    assert prompts_of(prompt) == want


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], [True]], [1.5], [None]])
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidValue):
        prompts_of(prompt)


def _chunk(index: int, text: str, ids: tuple[int, ...], finish: Finish | None = None) -> GenerateChunk:
    logprobs = tuple(TokenLogprob(i, -1.0) for i in ids)
    return GenerateChunk(index, text, ids, 3, len(ids), 1, finish=finish, logprobs=logprobs, seed=9, rid="r")


def test_chunks_become_one_result_a_choice() -> None:
    end = Finish(FinishKind.STOP, matched="x")
    results = results_of([_chunk(1, "c", (3,)), _chunk(0, "a", (1,)), _chunk(1, "d", (4,), end), _chunk(0, "b", (2,), end)])
    assert [(r.index, r.text, r.token_ids, r.finish_reason, r.matched, r.seed) for r in results] == [
        (0, "ab", (1, 2), "stop", "x", 9),
        (1, "cd", (3, 4), "stop", "x", 9),
    ]
    assert [p.token_id for p in results[1].logprobs] == [3, 4]


def test_a_failed_choice_raises() -> None:
    with pytest.raises(RequestFailed, match="nan"):
        results_of([_chunk(0, "a", (1,)), _chunk(0, "", (), Finish(FinishKind.ERROR, status=500, message="nan"))])


def test_a_choice_that_the_engine_could_not_serve_keeps_its_status() -> None:
    gone = Finish(FinishKind.ERROR, status=503, code="engine_dead", message="it broke")
    with pytest.raises(Unavailable, match="it broke") as caught:
        results_of([_chunk(0, "", (), gone)])
    assert (caught.value.status, caught.value.code) == (503, "engine_dead")
