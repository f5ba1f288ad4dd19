"""What every generation dialect shares: the fields beside prompt and sampling, and the internal request that they become.

Pure functions over the internal request model (architecture D12): no dialect imports another. Source: docs/api.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rootlet.core.errors import Unsupported
from rootlet.core.ids import MAX_RID_CHARS, RID_CHARS
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import LogprobSpec
from rootlet.frontend.types import GenerateReq
from rootlet.server.context import ServerContext, new_id
from rootlet.server.fields import Fields

_RID = re.compile(f"[{RID_CHARS}]{{1,{MAX_RID_CHARS}}}")


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


def generate_req(prompt: str | tuple[int, ...], arguments: dict[str, Any], *, add_special_tokens: bool) -> GenerateReq:
    if isinstance(prompt, str):
        return GenerateReq(prompt=prompt, add_special_tokens=add_special_tokens, **arguments)
    return GenerateReq(input_ids=prompt, **arguments)
