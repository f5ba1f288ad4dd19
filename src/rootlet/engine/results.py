"""What the Python API takes and gives: sampling as a dict or `SamplingParams`, results as small dataclasses. Pure functions, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rootlet.core.errors import InvalidValue, error_of
from rootlet.core.registry import did_you_mean
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import FinishKind, TokenLogprob
from rootlet.frontend.types import GenerateChunk
from rootlet.ipc.messages import ReqStats

_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


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


def sampling_of(given: Mapping[str, Any] | SamplingParams | None, defaults: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from field names (and max_tokens, min_tokens); what is absent comes from `defaults`. Raises `InvalidValue`."""
    if isinstance(given, SamplingParams):
        return given
    named = {_ALIASES.get(key, key): value for key, value in (given or {}).items()}
    for key in ("stop", "stop_token_ids", "allowed_token_ids"):
        value = named.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool):
            named[key] = (value,)
        elif isinstance(value, list):
            named[key] = tuple(value)
    for key in named:
        if key not in SamplingParams.__struct_fields__:
            raise InvalidValue(key, f"unknown sampling parameter {key!r}{did_you_mean(key, SamplingParams.__struct_fields__)}")
    try:
        return msgspec.convert({**defaults, **{k: v for k, v in named.items() if v is not None}}, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidValue("sampling", f"bad sampling parameters: {error}") from error


def prompts_of(prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> tuple[list[str | tuple[int, ...]], bool]:
    """(prompts, was it a list of prompts). A sequence of ints is one prompt. Raises `InvalidValue` for a mixture."""
    if isinstance(prompt, str):
        return [prompt], False
    items = list(prompt)
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [tuple(item for item in items if isinstance(item, int))], False
    many: list[str | tuple[int, ...]] = []
    for k, item in enumerate(items):
        if isinstance(item, str):
            many.append(item)
        elif isinstance(item, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in item):
            many.append(tuple(item))
        else:
            raise InvalidValue(f"prompt[{k}]", f"prompt[{k}] must be text or a list of token ids, got {type(item).__name__}")
    if not many:
        raise InvalidValue("prompt", "the prompt is empty: at least one token is needed")
    return many, True


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
