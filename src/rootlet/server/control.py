"""Routes for operators that change what the engine does: pause and continue, and the prefix cache: its tree, sizes and pins."""

from __future__ import annotations

from functools import partial
from typing import cast

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rootlet.core.errors import InvalidValue, NotFound
from rootlet.server.admin import json_response
from rootlet.server.context import ServerContext, offload
from rootlet.server.door import PauseMode
from rootlet.server.errors import HttpError, show
from rootlet.server.fields import Fields, check_ids

PAUSE_MODES = ("abort", "retract", "in_place")
DEFAULT_TTL_S = 300.0
MAX_TTL_S = 86_400.0


async def pause_generation(context: ServerContext, request: Request) -> Response:
    """Nothing is launched until /continue_generation; `mode` says what becomes of the requests inside (as SGLang's: abort unless told)."""
    fields = await context.read_fields(request)  # no body at all is refused: a stray POST must not abort everything
    mode = fields.string("mode") or "abort"
    if mode not in PAUSE_MODES:
        raise fields.refuse("mode", f"one of {', '.join(PAUSE_MODES)}")
    return json_response({"status": "ok", "mode": mode, **await context.manager.control.pause(cast("PauseMode", mode))})


async def continue_generation(context: ServerContext, _request: Request) -> Response:
    return json_response({"status": "ok", **await context.manager.control.resume()})


async def cache_tree(context: ServerContext, _request: Request) -> Response:
    """The radix tree as text."""
    state = await context.manager.get_state("tree")
    return PlainTextResponse(state["tree"] + "\n")


async def cache_stats(context: ServerContext, _request: Request) -> Response:
    """Sizes now and counters since the start, and what is pinned."""
    state = await context.manager.get_state("metrics")
    return json_response({"cache": state.get("cache", {}), **await context.manager.control.pins()})


async def cache_pin(context: ServerContext, request: Request) -> Response:
    """Keeps a cached prefix, given as text or as token ids, for `ttl_s` seconds. Raises `NotFound` when nothing of it is cached."""
    fields = await context.read_fields(request)
    context.require_ready()
    ids = await _prefix(context, fields)
    ttl_s = fields.number("ttl_s", low=0.0, high=MAX_TTL_S)
    if ttl_s == 0.0:
        raise fields.refuse("ttl_s", f"more than 0 and at most {MAX_TTL_S:g} seconds")
    answer = await context.manager.control.pin(
        ids,
        ttl_s=DEFAULT_TTL_S if ttl_s is None else ttl_s,
        extra_key=fields.string("extra_key", max_chars=512),
        cache_salt=fields.string("cache_salt", max_chars=512),
    )
    if "error" in answer:
        raise HttpError(409, str(answer["error"]), code="too_many_pins")
    if answer["pin_id"] is None:
        given = fields.present("input_ids", "text")
        error = NotFound(f"no whole page of these {len(ids)} tokens is cached, so there is nothing to pin", param=given)
        error.code = "prefix_not_cached"
        raise error
    return json_response(answer)


async def _prefix(context: ServerContext, fields: Fields) -> tuple[int, ...]:
    tokenizer = context.manager.tokenizer
    name = fields.present("input_ids", "text")
    if name == "input_ids":
        context.check_prompt_len("input_ids", len(fields.array("input_ids") or ()))
        return check_ids(fields.raw("input_ids"), "input_ids", tokenizer.vocab_size)
    text = fields.string("text") if name == "text" else None
    if not text:
        raise InvalidValue("text", "text or input_ids is required: the prefix to pin")
    context.check_text("text", text)  # no prompt that long was ever cached
    encode = partial(tokenizer.encode, text, add_special_tokens=fields.boolean("add_special_tokens", default=True))
    return tuple(await offload(len(text), encode))


async def cache_unpin(context: ServerContext, request: Request) -> Response:
    """Gives one pin up by its id, or all. Raises `NotFound` for an id that is not pinned (its time may be over)."""
    fields = await context.read_fields(request)
    pin_id = fields.string("pin_id", max_chars=64)
    if not pin_id and not fields.boolean("all"):
        raise InvalidValue("pin_id", "pin_id is required: the id that /cache/pin gave, or all: true")
    answer = await context.manager.control.unpin(pin_id or None)
    if pin_id and not answer["unpinned"]:
        error = NotFound(f"no pin {show(pin_id)}: it was unpinned, its time is over, or it had to yield", param="pin_id")
        error.code = "pin_not_found"
        raise error
    return json_response(answer)
