"""What the Python API gives: results as small dataclasses. Pure functions, no engine. What it takes is `arguments.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rootlet.core.errors import error_of
from rootlet.core.types import FinishKind, TokenLogprob
from rootlet.frontend.types import GenerateChunk
from rootlet.ipc.messages import ReqStats


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One choice. `finish_reason`: "stop", "length" or "abort"; `matched` = the stop string or token id that ended it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_len: int
    completion_len: int
    cached_len: int
    seed: int | None
    rid: str
    index: int = 0
    matched: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    stats: ReqStats | None = None


def results_of(chunks: Iterable[GenerateChunk]) -> list[GenerateResult]:
    """All chunks of one request -> one result a choice, in order. Raises the `RootletError` of a choice that failed."""
    by_index: dict[int, list[GenerateChunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    return [_one(by_index[index]) for index in sorted(by_index)]


def _one(chunks: list[GenerateChunk]) -> GenerateResult:
    last = chunks[-1]
    assert last.finish is not None, "a stream without a terminal chunk"
    if last.finish.kind is FinishKind.ERROR:
        raise error_of(last.finish)
    return GenerateResult(
        text="".join(c.text for c in chunks),
        token_ids=tuple(i for c in chunks for i in c.token_ids),
        finish_reason=str(last.finish.kind),
        prompt_len=last.prompt_len,
        completion_len=last.completion_len,
        cached_len=last.cached_len,
        seed=last.seed,
        rid=last.rid,
        index=last.index,
        matched=last.finish.matched,
        logprobs=tuple(p for c in chunks for p in c.logprobs),
        prompt_logprobs=next((c.prompt_logprobs for c in chunks if c.prompt_logprobs is not None), None),
        stats=last.stats,
    )
