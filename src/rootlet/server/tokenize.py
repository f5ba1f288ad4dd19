"""`POST /tokenize` and `/detokenize`, in the three spellings in use: `prompt` or `text` (SGLang, vLLM), `messages` (vLLM), `content` (llama.cpp)."""

from __future__ import annotations

from functools import partial
from typing import Any

from rootlet.core.errors import InvalidValue
from rootlet.server.context import ServerContext, offload
from rootlet.server.fields import Fields, check_ids
from rootlet.server.render import render

MAX_ITEMS = 1024


async def tokenize(context: ServerContext, fields: Fields) -> dict[str, Any]:
    """Ids of a text, of several, or of a rendered conversation. Raises `InvalidValue`, `TemplateError`."""
    name = fields.present("messages", "prompt", "text", "content")
    if name is None:
        raise InvalidValue("prompt", "one of prompt, text, messages and content is required")
    if name == "messages":
        text = await render(fields, context)
        return _reply(context, fields, await _encode(context, text, add_special_tokens=fields.boolean("add_special_tokens")))
    value = fields.raw(name)
    if name == "content":
        ids = await _encode(context, _text(value, name), add_special_tokens=fields.boolean("add_special"))
        if fields.boolean("with_pieces"):
            return {"tokens": [{"id": i, "piece": _piece(context, i)} for i in ids]}
        return {"tokens": ids}
    add_special_tokens = fields.boolean("add_special_tokens", default=True)
    if isinstance(value, list):
        if len(value) > MAX_ITEMS:
            raise fields.refuse(name, f"a string or a list of at most {MAX_ITEMS} strings")
        texts = [_text(item, f"{name}[{i}]") for i, item in enumerate(value)]
        lists = [await _encode(context, text, add_special_tokens=add_special_tokens) for text in texts]
        return {"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": _context_len(context)}
    return _reply(context, fields, await _encode(context, _text(value, name), add_special_tokens=add_special_tokens))


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidValue(param, f"{param} must be a string")
    return value


async def _encode(context: ServerContext, text: str, *, add_special_tokens: bool) -> list[int]:
    return list(await offload(len(text), partial(context.manager.tokenizer.encode, text, add_special_tokens=add_special_tokens)))


def _context_len(context: ServerContext) -> int | None:
    ready = context.manager.ready_info
    return ready.max_context_len if ready else None


def _reply(context: ServerContext, fields: Fields, ids: list[int]) -> dict[str, Any]:
    reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": _context_len(context)}
    if fields.boolean("return_token_strs"):
        reply["token_strs"] = [context.manager.tokenizer.id_to_token(i) for i in ids]
    return reply


def _piece(context: ServerContext, token_id: int) -> str | list[int]:
    """The token's text, or its bytes where they are no whole characters."""
    raw = context.manager.tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(context: ServerContext, fields: Fields) -> dict[str, Any]:
    """Text of ids, under the key of every dialect. Raises `InvalidValue`."""
    value = fields.raw("tokens")
    if not isinstance(value, list):
        raise InvalidValue("tokens", "tokens is required: a list of token ids, or a list of such lists")
    skip = fields.boolean("skip_special_tokens")
    decode = context.manager.tokenizer.decode
    text: str | list[str]
    if value and isinstance(value[0], list):
        lists = [check_ids(item, f"tokens[{i}]", context.vocab_size) for i, item in enumerate(value)]
        text = [decode(ids, skip_special_tokens=skip) for ids in lists]
    else:
        ids = check_ids(value, "tokens", context.vocab_size)
        text = await offload(4 * len(ids), partial(decode, ids, skip_special_tokens=skip))
    return {"text": text, "prompt": text, "content": text}
