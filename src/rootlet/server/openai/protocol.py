"""What the two OpenAI generation routes share: logprob requests, usage, and the pre-rendered SSE frames.

Pure functions over the internal request and event model (architecture D12). Source: docs/api.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rootlet.core.errors import InvalidValue
from rootlet.core.types import Finish, FinishKind, LogprobSpec
from rootlet.ipc.messages import ReqStats
from rootlet.server.context import ServerContext
from rootlet.server.events import Answer
from rootlet.server.fields import Fields
from rootlet.server.generation import Common


def logprob_spec(top_n: int | None, *, prompt: bool, common: Common) -> LogprobSpec | None:
    """What to ask the engine for: `top_n` None = nothing for the output; the extension `prompt_logprobs` may ask for more than it."""
    prompt_start = 0 if prompt or common.prompt_top_n is not None else None
    if top_n is None and prompt_start is None:
        return None
    return LogprobSpec(top_n=max(top_n or 0, common.prompt_top_n or 0), prompt_start=prompt_start)


def finish_reason(finish: Finish | None) -> str | None:
    """stop or length: a failed generation is an error and never gets here."""
    if finish is None:
        return None
    assert finish.kind in (FinishKind.STOP, FinishKind.LENGTH)
    return str(finish.kind)


@dataclass(slots=True)
class Counts:
    """Running totals of one prompt, for usage in a stream."""

    prompt_len: int = 0
    cached_len: int = 0
    completion_lens: dict[int, int] | None = None
    stats: ReqStats | None = None

    def completion_len(self) -> int:
        return sum((self.completion_lens or {}).values())


def counts_of(answers: Sequence[Answer]) -> Counts:
    first = answers[0]
    return Counts(first.prompt_len, first.cached_len, {k: a.completion_len for k, a in enumerate(answers)}, first.stats)


def usage(groups: Sequence[Counts]) -> dict[str, Any]:
    """The usage object over all prompts: a prompt counts once for its n choices, completion tokens are summed and include the stop token."""
    prompt_len = sum(c.prompt_len for c in groups)
    completion_len = sum(c.completion_len() for c in groups)
    cached_len = sum(c.cached_len for c in groups)
    host_len = sum(c.stats.cached_host_len for c in groups if c.stats)
    storage_len = sum(c.stats.cached_storage_len for c in groups if c.stats)
    return {
        "prompt_tokens": prompt_len,
        "completion_tokens": completion_len,
        "total_tokens": prompt_len + completion_len,
        "prompt_tokens_details": {"cached_tokens": cached_len},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cached_tokens_details": {"device": cached_len - host_len - storage_len, "host": host_len, "storage": storage_len},
    }


class UsageMeter:
    """Counts of a stream over all its prompts, and the usage part of its frames."""

    def __init__(self, common: Common, num_prompts: int) -> None:
        self._groups = [Counts(completion_lens={}) for _ in range(num_prompts)]
        self._common = common

    def update(self, prompt_index: int, chunk: Any) -> None:
        group = self._groups[prompt_index]
        group.prompt_len = chunk.prompt_len or group.prompt_len
        if chunk.index == 0:  # the parallel samples find the whole prompt in the cache, which choice 0 computed
            group.cached_len = chunk.cached_len
            group.stats = chunk.stats or group.stats
        assert group.completion_lens is not None
        group.completion_lens[chunk.index] = chunk.completion_len

    def part(self) -> bytes:
        """`,"usage":...` of a chunk before the last one, or nothing."""
        if self._common.continuous_usage:
            return b',"usage":' + orjson.dumps(usage(self._groups))
        return b',"usage":null' if self._common.include_usage else b""

    def final(self, head: bytes) -> bytes:
        """The usage chunk, with an empty list of choices; empty when nobody asked."""
        if not self._common.include_usage:
            return b""
        return head + b'"choices":[],"usage":' + orjson.dumps(usage(self._groups)) + b"}\n\n"


def frame_head(context: ServerContext, *, rid: str, kind: str, created: int, model: str) -> bytes:
    """The constant beginning of a stream's frames, up to the choices: rendered once."""
    constant = {"id": rid, "object": kind, "created": created, "model": model, "system_fingerprint": context.system_fingerprint}
    return b"data: " + orjson.dumps(constant)[:-1] + b","


def max_logprobs_field(fields: Fields, name: str, limit: int) -> int | None:
    return fields.integer(name, low=0, high=limit, knob="--max-logprobs")


def required(fields: Fields, name: str, wanted: str) -> Any:
    value = fields.raw(name)
    if value is None:
        raise InvalidValue(fields.param(name), f"{fields.param(name)} is required: {wanted}")
    return value
