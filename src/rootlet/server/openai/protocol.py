"""What the two OpenAI generation routes share: the fields beside prompt and sampling, logprob requests, usage, and the pre-rendered SSE frames.

Pure functions over the internal request and event model (architecture D12). Source: docs/api.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rootlet.core.errors import InvalidValue, Unsupported
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Finish, FinishKind, LogprobSpec
from rootlet.frontend.types import GenerateReq
from rootlet.ipc.messages import ReqStats
from rootlet.server.context import ServerContext, new_id
from rootlet.server.events import Answer
from rootlet.server.fields import Fields

MAX_TEMPERATURE = 2.0
_RID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Fields of a generation request beside its prompt and its sampling."""

    rid: str
    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    keepalive_s: float
    return_token_ids: bool
    prompt_top_n: int | None
    cache_salt: str | None
    extra_key: str | None
    priority: int | None
    deadline_s: float | None
    user: str | None
    routing_key: str | None

    def request(self, *, sampling: SamplingParams, logprobs: LogprobSpec | None, param: str, rid: str | None = None) -> dict[str, Any]:
        """The keyword arguments of a `GenerateReq`, but for its prompt."""
        return {
            "sampling": sampling, "logprobs": logprobs, "stream": self.stream, "rid": rid or self.rid, "extra_key": self.extra_key,
            "cache_salt": self.cache_salt, "priority": self.priority, "deadline_s": self.deadline_s, "user": self.user, "param": param,
            "routing_key": self.routing_key,
        }  # fmt: skip


def read_rid(fields: Fields, name: str) -> str | None:
    """An id for abort and logs: letters, digits and `._:-`, at most 128."""
    rid = fields.string(name)
    if rid is not None and not _RID.fullmatch(rid):
        raise fields.refuse(name, "at most 128 letters, digits, or . _ : -")
    return rid


def read_common(fields: Fields, context: ServerContext, *, prefix: str) -> Common:
    """Raises `InvalidValue`, `NotFound` for an unknown model, `Unsupported` for adapters."""
    if fields.raw("lora_path") or fields.raw("lora_id"):
        raise Unsupported("LoRA adapters are not supported by this server", param=fields.param("lora_path"))
    stream = fields.boolean("stream")
    options = fields.object("stream_options") if stream else None
    include_usage = options is not None and options.boolean("include_usage")
    keepalive_s = fields.number("sse_ping_interval", low=0.0, high=3600.0)
    return Common(
        rid=read_rid(fields, fields.present("request_id", "rid") or "rid") or new_id(prefix),
        model=context.model_name(fields),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and options.boolean("continuous_usage_stats"),
        keepalive_s=context.config.server.sse_keepalive if keepalive_s is None else keepalive_s,
        return_token_ids=fields.boolean("return_token_ids"),
        prompt_top_n=fields.integer("prompt_logprobs", low=0, high=context.config.server.max_logprobs, knob="--max-logprobs"),
        cache_salt=fields.string("cache_salt", max_chars=512),
        extra_key=fields.string("extra_key", max_chars=512),
        priority=fields.integer("priority", low=-(2**31), high=2**31 - 1),
        deadline_s=_deadline(fields),
        user=fields.string("user", max_chars=4096),
        routing_key=fields.string("routing_key", max_chars=512),
    )


def _deadline(fields: Fields) -> float | None:
    value = fields.number("deadline_s", low=0.0)
    if value == 0.0:
        raise fields.refuse("deadline_s", "more than 0 seconds")
    return value


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


def generate_req(prompt: str | tuple[int, ...], arguments: dict[str, Any], *, add_special_tokens: bool) -> GenerateReq:
    if isinstance(prompt, str):
        return GenerateReq(prompt=prompt, add_special_tokens=add_special_tokens, **arguments)
    return GenerateReq(input_ids=prompt, **arguments)


def required(fields: Fields, name: str, wanted: str) -> Any:
    value = fields.raw(name)
    if value is None:
        raise InvalidValue(fields.param(name), f"{fields.param(name)} is required: {wanted}")
    return value
