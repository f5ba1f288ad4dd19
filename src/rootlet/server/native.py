"""`POST /generate`: the native dialect, as SGLang's clients and kits speak it. One prompt or a batch, text or ids, `sampling_params` beside them.

A stream's chunks carry the whole text so far (a delta with `"incremental": true`). Errors have the same envelope as everywhere. A pure dialect over
`GenerateReq` and `GenerateChunk`. Source: docs/api.md, "/generate".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rootlet.core.errors import InvalidValue, Unsupported
from rootlet.core.types import Finish, FinishKind, LogprobSpec, TokenLogprob
from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.server.context import ServerContext, tenant_of
from rootlet.server.door import Tokenizer
from rootlet.server.events import Answer, collect, open_events, until_gone
from rootlet.server.fields import Fields
from rootlet.server.generation import Common, generate_req, read_common, read_namespace, read_rid
from rootlet.server.prompts import check_choices, check_prompts, read_prompts
from rootlet.server.sampling import MaxTokens, read_sampling, refuse_constraints
from rootlet.server.sse import frame, stream_reply
from rootlet.server.token_json import alone, finite

LENGTH = MaxTokens(names=("max_new_tokens", "max_tokens"), default=128, zero_ok=True)
_PER_PROMPT = (
    "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid", "lora_path", "lora_id", "extra_key", "cache_salt",
)  # fmt: skip
_UNSUPPORTED = ("token_ids_logprob", "session_params", "image_data", "audio_data", "video_data", "input_embeds", "return_hidden_states")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest:
    reqs: list[GenerateReq]
    is_batch: bool
    with_text: bool
    incremental: bool
    common: Common


async def generate(context: ServerContext, request: Request) -> Response:
    """Raises `RootletError` for everything that can be said before the first token."""
    context.require_ready()
    native = await parse_native(await context.read_fields(request), context, tenant=tenant_of(request))
    if native.common.stream:
        return await stream_reply(context, request, native_frames(context, native), keepalive_s=native.common.keepalive_s)
    groups = await until_gone(request, collect(context, native.reqs))
    tokenizer = context.manager.tokenizer
    items = [
        answer_json(answer, req, tokenizer, with_text=native.with_text)
        for req, group in zip(native.reqs, groups, strict=True)
        for answer in group
    ]  # fmt: skip
    return Response(orjson.dumps(items if native.is_batch else items[0]), media_type="application/json")


async def parse_native(fields: Fields, context: ServerContext, *, tenant: str | None = None) -> NativeRequest:
    """Everything that can be refused without the engine is refused here, for all prompts before the first starts."""
    for name in _UNSUPPORTED:
        if fields.raw(name):
            raise Unsupported(f"{fields.param(name)} is not supported by this server", param=fields.param(name))
    refuse_constraints(fields)
    source = _source(fields)
    value = fields.raw(source)
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    if source == "text" and isinstance(value, list) and not (value and all(isinstance(item, str) for item in value)):
        raise fields.refuse("text", "a string or a list of strings")
    prompts = read_prompts(value, source, context, n=1)
    common = read_common(Fields({**fields.data, **dict.fromkeys(_PER_PROMPT), "request_id": None}), context, prefix="gen-", tenant=tenant)
    add_special = fields.boolean("add_special_tokens", default=True)
    arguments = [_arguments(_view(fields, i, len(prompts), is_list=is_list), context, common, i) for i in range(len(prompts))]
    check_choices(context, len(prompts), sum(a["sampling"].n for a in arguments), source)
    given = fields.raw("rid")
    batch_rid = common.rid if given is None else given if is_list and isinstance(given, str) else None  # what the client may know all of them by
    if len({a["rid"] for a in arguments}) != len(arguments):
        raise fields.refuse("rid", "a list of distinct ids, one a prompt")
    prompts = await check_prompts(prompts, context, add_special_tokens=add_special, tokenize=False)
    reqs = [
        generate_req(prompt.content, {**argument, "param": prompt.param, "batch_rid": batch_rid}, add_special_tokens=add_special)
        for prompt, argument in zip(prompts, arguments, strict=True)
    ]
    return NativeRequest(
        reqs=reqs,
        is_batch=is_list or reqs[0].sampling.n > 1,
        with_text=fields.boolean("return_text_in_logprobs"),
        incremental=fields.boolean("incremental"),
        common=common,
    )


def _source(fields: Fields) -> str:
    given = [name for name in ("text", "input_ids") if fields.raw(name) is not None]
    if len(given) != 1:
        raise InvalidValue(given[0] if given else "text", f"exactly one of text and input_ids must be given, got {len(given)}")
    if given[0] == "input_ids":
        value = fields.raw("input_ids")
        if not isinstance(value, list) or any(isinstance(item, str) for item in value[:1]):
            raise fields.refuse("input_ids", "a list of token ids or a list of such lists")
    return given[0]


def _view(fields: Fields, i: int, num_prompts: int, *, is_list: bool) -> Fields:
    """The fields of prompt i: those that may be lists, one entry a prompt, are picked."""
    data = dict(fields.data)
    for name in _PER_PROMPT:
        value = data.get(name)
        if isinstance(value, list):
            if not is_list or len(value) != num_prompts:
                raise InvalidValue(name, f"{name} is a list of {len(value)}; it must be one value, or one for each of the {num_prompts} prompts")
            data[name] = value[i]
        elif name == "rid" and isinstance(value, str) and is_list:
            data[name] = f"{value}-{i}"
    return Fields(data)


def _arguments(fields: Fields, context: ServerContext, common: Common, i: int) -> dict[str, Any]:
    params = fields.object("sampling_params") or Fields({}, "sampling_params")
    sampling = read_sampling(params, context.limits(), LENGTH)
    rid = read_rid(fields, "rid") or f"{common.rid}-{i}"
    arguments = common.request(sampling=sampling, logprobs=_logprobs(fields, context), param="text", rid=rid)
    return arguments | read_namespace(fields)._asdict()


def _logprobs(fields: Fields, context: ServerContext) -> LogprobSpec | None:
    start = fields.integer("logprob_start_len", low=-1)
    top_n = fields.integer("top_logprobs_num", low=0, high=context.config.server.max_logprobs, knob="--max-logprobs")
    if not fields.boolean("return_logprob"):
        if top_n:
            raise InvalidValue("top_logprobs_num", f"top_logprobs_num={top_n} needs return_logprob to be true")
        return None
    return LogprobSpec(top_n=top_n or 0, prompt_start=None if start is None or start < 0 else start)


def finish_json(finish: Finish | None, completion_len: int) -> dict[str, Any] | None:
    """`{type: stop, matched}` or `{type: length, length}`."""
    if finish is None:
        return None
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": completion_len}
    return {"type": str(finish.kind), "matched": finish.matched}


def answer_json(answer: Answer, req: GenerateReq, tokenizer: Tokenizer, *, with_text: bool) -> dict[str, Any]:
    """One item of the reply; also each cumulative chunk of a stream."""
    meta: dict[str, Any] = {
        "id": answer.rid or req.rid,
        "finish_reason": finish_json(answer.finish, answer.completion_len),
        "prompt_tokens": answer.prompt_len,
        "completion_tokens": answer.completion_len,
        "cached_tokens": answer.cached_len,
        "reasoning_tokens": 0,
        "weight_version": "default",
        "seed": answer.seed,
    }
    stats = answer.stats
    if stats is not None:
        host_len, storage_len = stats.cached_host_len, stats.cached_storage_len
        decode_s = stats.e2e_s - stats.ttft_s
        meta |= {
            "cached_tokens_details": {"device": answer.cached_len - host_len - storage_len, "host": host_len, "storage": storage_len},
            "e2e_latency": stats.e2e_s,
            "queue_time": stats.queue_s,
            "first_token_latency": stats.ttft_s,
            "decode_throughput": (answer.completion_len - 1) / decode_s if decode_s > 0 and answer.completion_len > 1 else 0.0,
            "num_retractions": stats.num_retractions,
        }
    if req.logprobs is not None:
        meta |= _logprobs_json(answer, req.logprobs, tokenizer, with_text=with_text)
    return {"text": "".join(answer.text), "output_ids": answer.token_ids, "meta_info": meta}


def _logprobs_json(answer: Answer, spec: LogprobSpec, tokenizer: Tokenizer, *, with_text: bool) -> dict[str, Any]:
    prompt = answer.prompt_logprobs or ()
    result = {
        "input_token_logprobs": _own(prompt, tokenizer, with_text=with_text),
        "output_token_logprobs": _own(answer.logprobs, tokenizer, with_text=with_text),
        "output_token_logprobs_length": len(answer.logprobs),
    }
    if spec.top_n:
        result["input_top_logprobs"] = _top(prompt, tokenizer, with_text=with_text)
        result["output_top_logprobs"] = _top(answer.logprobs, tokenizer, with_text=with_text)
    return result


def _own(entries: Sequence[TokenLogprob], tokenizer: Tokenizer, *, with_text: bool) -> list[list[Any]]:
    return [[finite(e.logprob), e.token_id, alone(tokenizer, e.token_id) if with_text else None] for e in entries]


def _top(entries: Sequence[TokenLogprob], tokenizer: Tokenizer, *, with_text: bool) -> list[list[list[Any]] | None]:
    return [
        None if e.logprob is None else [
            [finite(p), i, alone(tokenizer, i) if with_text else None] for i, p in zip(e.top_ids, e.top_logprobs, strict=True)
        ]
        for e in entries
    ]  # fmt: skip


async def native_frames(context: ServerContext, native: NativeRequest) -> AsyncGenerator[bytes, None]:
    """The stream but for `[DONE]`: one frame an event, with the index of its choice when there are several."""
    tokenizer = context.manager.tokenizer
    firsts: list[int] = []
    total = 0
    for req in native.reqs:
        firsts.append(total)
        total += req.sampling.n
    answers = [Answer() for _ in range(total)]
    async with aclosing(open_events(context, native.reqs)) as events:
        async for i, chunk in events:
            index = firsts[i] + chunk.index
            answer = answers[index]
            if native.incremental:
                _forget(answer)
            answer.add(chunk)
            if not _has_news(chunk):
                continue
            item = answer_json(answer, native.reqs[i], tokenizer, with_text=native.with_text)
            yield frame(orjson.dumps({**item, "index": index} if native.is_batch else item))


def _forget(answer: Answer) -> None:
    answer.text, answer.token_ids, answer.logprobs, answer.prompt_logprobs = [], [], [], None


def _has_news(chunk: GenerateChunk) -> bool:
    return bool(chunk.text or chunk.token_ids or chunk.finish or chunk.logprobs or chunk.prompt_logprobs)
