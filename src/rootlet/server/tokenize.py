"""`POST /tokenize` and `/detokenize`, in the three spellings in use: `prompt` or `text` (SGLang, vLLM), `messages` (vLLM), `content` (llama.cpp).

No context bounds these texts, so they have a bound of their own: the tokenizer takes some 150 bytes a character while it works. Whatever goes over
single tokens runs beside the event loop.
"""

from __future__ import annotations

from typing import Any

from rootlet.core.errors import InvalidValue, TooLarge
from rootlet.server.context import ServerContext, offload
from rootlet.server.fields import Fields, check_ids
from rootlet.server.render import render

MAX_ITEMS = 1024
MAX_CHARS = 2**20  # of all texts of a request
MAX_IDS = 2**20


async def tokenize(context: ServerContext, fields: Fields) -> dict[str, Any]:
    """Ids of a text, of several, or of a rendered conversation. Raises `InvalidValue`, `TemplateError`, `TooLarge`."""
    name = fields.present("messages", "prompt", "text", "content")
    if name is None:
        raise InvalidValue("prompt", "one of prompt, text, messages and content is required")
    if name == "messages":
        return await _one(context, fields, await render(fields, context), add_special_tokens=fields.boolean("add_special_tokens"))
    value = fields.raw(name)
    if name == "content":
        return await _content(context, fields, _text(value, name))
    add_special_tokens = fields.boolean("add_special_tokens", default=True)
    if not isinstance(value, list):
        return await _one(context, fields, _text(value, name), add_special_tokens=add_special_tokens)
    if len(value) > MAX_ITEMS:
        raise fields.refuse(name, f"a string or a list of at most {MAX_ITEMS} strings")
    texts = [_text(item, f"{name}[{i}]") for i, item in enumerate(value)]
    encode = context.manager.tokenizer.encode
    lists = await offload(_size(*texts), lambda: [encode(text, add_special_tokens=add_special_tokens) for text in texts])
    return {"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": _context_len(context)}


async def _one(context: ServerContext, fields: Fields, text: str, *, add_special_tokens: bool) -> dict[str, Any]:
    tokenizer = context.manager.tokenizer
    with_strs = fields.boolean("return_token_strs")

    def work() -> dict[str, Any]:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": _context_len(context)}
        return {**reply, "token_strs": [tokenizer.id_to_token(i) for i in ids]} if with_strs else reply

    return await offload(_size(text), work)


async def _content(context: ServerContext, fields: Fields, text: str) -> dict[str, Any]:
    add_special, with_pieces = fields.boolean("add_special"), fields.boolean("with_pieces")

    def work() -> dict[str, Any]:
        ids = context.manager.tokenizer.encode(text, add_special_tokens=add_special)
        return {"tokens": [{"id": i, "piece": _piece(context, i)} for i in ids] if with_pieces else ids}

    return await offload(_size(text), work)


def _size(*texts: str) -> int:
    """Characters of all `texts`. Raises `TooLarge`."""
    size = sum(map(len, texts))
    if size > MAX_CHARS:
        raise TooLarge(f"{size:,} characters are too many for one request to tokenize, at most {MAX_CHARS:,} may be; send them in several requests")
    return size


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidValue(param, f"{param} must be a string")
    return value


def _context_len(context: ServerContext) -> int | None:
    ready = context.manager.ready_info
    return ready.max_context_len if ready else None


def _piece(context: ServerContext, token_id: int) -> str | list[int]:
    """The token's text, or its bytes where they are no whole characters."""
    raw = context.manager.tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(context: ServerContext, fields: Fields) -> dict[str, Any]:
    """Text of ids, under the key of every dialect. Raises `InvalidValue`, `TooLarge`."""
    value = fields.raw("tokens")
    if not isinstance(value, list):
        raise InvalidValue("tokens", "tokens is required: a list of token ids, or a list of such lists")
    skip = fields.boolean("skip_special_tokens")
    decode = context.manager.tokenizer.decode
    several = bool(value) and isinstance(value[0], list)
    if several and len(value) > MAX_ITEMS:
        raise fields.refuse("tokens", f"a list of token ids or at most {MAX_ITEMS} such lists")
    size = sum(len(item) for item in value if isinstance(item, list)) if several else len(value)
    if size > MAX_IDS:
        raise TooLarge(f"{size:,} token ids are too many for one request to detokenize, at most {MAX_IDS:,} may be; send them in several requests")
    named = [(item, f"tokens[{i}]") for i, item in enumerate(value)] if several else [(value, "tokens")]
    lists = [check_ids(item, param, context.vocab_size) for item, param in named]
    texts = await offload(4 * size, lambda: [decode(ids, skip_special_tokens=skip) for ids in lists])
    text = texts if several else texts[0]
    return {"text": text, "prompt": text, "content": text}
