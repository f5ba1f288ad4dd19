"""What every generation dialect shares: the fields beside prompt and sampling, and the internal request that they become.

Pure functions over the internal request model (architecture D12): no dialect imports another. Source: docs/api.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rootlet.core.ids import MAX_RID_CHARS, RID_CHARS
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import LogprobSpec, Namespace
from rootlet.frontend.types import GenerateReq
from rootlet.server.context import ServerContext, new_id
from rootlet.server.fields import Fields

MIN_PING_S = 1.0
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
    namespace: Namespace
    priority: int | None
    deadline_s: float | None
    user: str | None
    routing_key: str | None

    def request(
        self, *, sampling: SamplingParams, logprobs: LogprobSpec | None, param: str, rid: str | None = None, batch_rid: str | None = None
    ) -> dict[str, Any]:
        """The keyword arguments of a `GenerateReq`, but for its prompt."""
        return {
            **self.namespace._asdict(), "sampling": sampling, "logprobs": logprobs, "stream": self.stream, "rid": rid or self.rid, "param": param,
            "batch_rid": batch_rid,
            "priority": self.priority, "deadline_s": self.deadline_s, "user": self.user, "routing_key": self.routing_key,
        }  # fmt: skip


def read_rid(fields: Fields, name: str) -> str | None:
    """An id for abort and logs: letters, digits and `._:-`, at most 128."""
    rid = fields.string(name)
    if rid is not None and not _RID.fullmatch(rid):
        raise fields.refuse(name, "at most 128 letters, digits, or . _ : -")
    return rid


def read_common(fields: Fields, context: ServerContext, *, prefix: str, tenant: str | None = None) -> Common:
    """`tenant`: whose API key it is; goes before the field `user`. Raises `InvalidValue`, `NotFound` for an unknown model."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options") if stream else None
    include_usage = options is not None and options.boolean("include_usage")
    user = fields.string("user", max_chars=4096)
    keepalive_s = fields.number("sse_ping_interval", low=0.0, high=3600.0)
    if keepalive_s is not None and 0.0 < keepalive_s < MIN_PING_S:
        raise fields.refuse("sse_ping_interval", f"0 (never), or {MIN_PING_S:g} to 3600 seconds")
    return Common(
        rid=read_rid(fields, fields.present("request_id", "rid") or "rid") or new_id(prefix),
        model=context.model_name(fields),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and options.boolean("continuous_usage_stats"),
        keepalive_s=context.config.server.sse_keepalive if keepalive_s is None else keepalive_s,
        return_token_ids=fields.boolean("return_token_ids"),
        prompt_top_n=fields.integer("prompt_logprobs", low=0, high=context.config.server.max_logprobs, knob="--max-logprobs"),
        namespace=read_namespace(fields),
        priority=fields.integer("priority", low=-(2**31), high=2**31 - 1),
        deadline_s=_deadline(fields),
        user=tenant or user,
        routing_key=fields.string("routing_key", max_chars=512),
    )


def read_namespace(fields: Fields) -> Namespace:
    """What must never share KV with anything else: the adapter, `extra_key`, `cache_salt`."""
    lora = fields.present("lora_path", "lora_id") or "lora_path"
    return Namespace(
        fields.string(lora, max_chars=512) or None, fields.string("extra_key", max_chars=512), fields.string("cache_salt", max_chars=512)
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
