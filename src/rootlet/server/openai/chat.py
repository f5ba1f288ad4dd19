"""`POST /v1/chat/completions`: messages in, choices or a stream of chunks out.

A pure dialect over `GenerateReq` and `GenerateChunk`; the chat template is rendered here, tokenized behind the door. Tools are shown to the model;
its calls come back as text. Streams: `chat_stream.py`. Source: docs/api.md.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rootlet.core.errors import InvalidValue, Unsupported
from rootlet.core.sampling_params import MAX_TEMPERATURE
from rootlet.server.context import ServerContext, offload, tenant_of
from rootlet.server.events import Answer, collect, until_gone
from rootlet.server.fields import Fields
from rootlet.server.generation import generate_req, read_common
from rootlet.server.openai.chat_stream import ChatRequest, ChoiceLogprobs, chat_frames
from rootlet.server.openai.logprobs import prompt_logprobs_json
from rootlet.server.openai.protocol import (
    counts_of,
    finish_reason,
    logprob_spec,
    max_logprobs_field,
    usage,
)
from rootlet.server.render import render
from rootlet.server.sampling import MaxTokens, read_sampling
from rootlet.server.sse import stream_reply

LENGTH = MaxTokens(names=("max_completion_tokens", "max_tokens"), default=None, zero_ok=False)


async def create_chat_completion(context: ServerContext, request: Request) -> Response:
    """Raises `RootletError` for everything that can be said before the first token."""
    context.require_ready()
    fields = await context.read_fields(request)
    chat = await parse_chat(fields, context, tenant=tenant_of(request))
    if chat.common.stream:
        return await stream_reply(context, request, chat_frames(context, chat), keepalive_s=chat.common.keepalive_s)
    answers = await until_gone(request, collect(context, [chat.req]))
    return Response(orjson.dumps(chat_reply(context, chat, answers[0])), media_type="application/json")


async def parse_chat(fields: Fields, context: ServerContext, *, tenant: str | None = None) -> ChatRequest:
    """Everything that can be refused without the engine is refused here."""
    common = read_common(fields, context, prefix="chatcmpl-", tenant=tenant)
    sampling = read_sampling(fields, context.limits(max_temperature=MAX_TEMPERATURE), LENGTH)
    refuse_unsupported(fields)
    top_n = _top_logprobs(fields, context)
    prompt = await render(fields, context)
    add_special_tokens = fields.boolean("add_special_tokens")
    ids: tuple[int, ...] | None = None
    if common.return_token_ids:
        context.check_text("messages", prompt)
        ids = tuple(await offload(len(prompt), lambda: context.manager.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)))
    arguments = common.request(sampling=sampling, logprobs=logprob_spec(top_n, prompt=False, common=common), param="messages")
    req = generate_req(ids if ids else prompt, arguments, add_special_tokens=add_special_tokens)
    return ChatRequest(req=req, common=common, top_n=top_n, prompt_ids=ids, service_tier=fields.string("service_tier", max_chars=64))


def refuse_unsupported(fields: Fields) -> None:
    """What needs constrained decoding or another modality. Malformed values are 400, well-formed ones 501."""
    wanted = fields.object("response_format")
    if wanted is not None:
        _check_response_format(wanted)
    choice = fields.raw("tool_choice")
    if isinstance(choice, str):
        fields.string("tool_choice", choices=("auto", "none", "required"))
    elif choice is not None and not (isinstance(choice, dict) and isinstance(choice.get("type"), str)):
        raise fields.refuse("tool_choice", "auto, none, required, or an object with a type")
    if choice not in (None, "auto", "none"):
        raise Unsupported("this server cannot force a tool call yet; use tool_choice auto or none", param=fields.param("tool_choice"))
    if fields.raw("function_call") not in (None, "auto", "none"):
        raise Unsupported("this server cannot force a function call yet; use auto or none", param=fields.param("function_call"))
    fields.boolean("parallel_tool_calls")
    if any(m != "text" for m in fields.array("modalities") or []):
        raise fields.refuse("modalities", '["text"]')


def _check_response_format(wanted: Fields) -> None:
    kind = wanted.string("type", choices=("text", "json_object", "json_schema", "structural_tag"))
    if kind is None:
        raise InvalidValue(wanted.param("type"), f"{wanted.param('type')} is required: text, json_object or json_schema")
    if kind == "json_schema":
        schema = wanted.object("json_schema")
        if schema is None or not isinstance(schema.raw("schema"), dict | bool):
            raise InvalidValue(wanted.param("json_schema.schema"), f"{wanted.param('json_schema.schema')} is required: a JSON schema")
    if kind != "text":
        raise Unsupported(f"response_format of type {kind} is not supported: output cannot be constrained yet", param=wanted.path)


def _top_logprobs(fields: Fields, context: ServerContext) -> int | None:
    top_n = max_logprobs_field(fields, "top_logprobs", context.config.server.max_logprobs)
    if not fields.boolean("logprobs"):
        if top_n is not None:
            raise InvalidValue(fields.param("top_logprobs"), "top_logprobs needs logprobs to be true")
        return None
    return top_n or 0


def chat_reply(context: ServerContext, chat: ChatRequest, answers: list[Answer]) -> dict[str, Any]:
    """The `chat.completion` object."""
    common = chat.common
    reply: dict[str, Any] = {
        "id": common.rid,
        "object": "chat.completion",
        "created": context.now_unix(),
        "model": common.model,
        "choices": [_choice(context, chat, k, answer) for k, answer in enumerate(answers)],
        "usage": usage([counts_of(answers)]),
        "system_fingerprint": context.system_fingerprint,
        "seed": answers[0].seed,
    }
    if chat.service_tier is not None:
        reply["service_tier"] = chat.service_tier
    if common.prompt_top_n is not None:
        reply["prompt_logprobs"] = prompt_logprobs_json(context.manager.tokenizer, answers[0].prompt_logprobs, common.prompt_top_n)
    if chat.prompt_ids is not None:
        reply["prompt_token_ids"] = chat.prompt_ids
    return reply


def _choice(context: ServerContext, chat: ChatRequest, index: int, answer: Answer) -> dict[str, Any]:
    assert answer.finish is not None
    text = "".join(answer.text)
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": finish_reason(answer.finish),
        "stop_reason": answer.finish.matched,
        "matched_stop": answer.finish.matched,
    }
    if chat.top_n is not None:
        state = ChoiceLogprobs(context, chat)
        choice["logprobs"] = state.logprobs(answer.logprobs, text, finished=True, matched=answer.finish.matched)
    if chat.common.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice
