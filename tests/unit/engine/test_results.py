"""The Python API's results: chunks become one result a choice, failures become exceptions."""

from __future__ import annotations

import pytest

from rootlet.core.errors import RequestFailed, Unavailable
from rootlet.core.types import Finish, FinishKind, TokenLogprob
from rootlet.engine.results import results_of
from rootlet.frontend.types import GenerateChunk


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
