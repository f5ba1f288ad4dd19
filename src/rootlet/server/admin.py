"""Health, readiness, information, cache control, abort and debug routes: what operators, routers and benchmark tools ask for."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rootlet.core.errors import InvalidValue, NotFound, RootletError
from rootlet.core.ids import MAX_WIRE_RID_CHARS
from rootlet.core.sampling_params import SamplingParams
from rootlet.frontend.types import GenerateReq
from rootlet.metrics.prometheus import CONTENT_TYPE, render
from rootlet.server.context import ServerContext, new_id
from rootlet.server.errors import HttpError, error_headers, raise_failure, show
from rootlet.server.events import metered, until_gone
from rootlet.server.fields import Fields

PROBE_TIMEOUT_S = 20.0
SCRAPE_TIMEOUT_S = 2.0
MAX_FLUSH_WAIT_S = 600.0


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def health(context: ServerContext) -> Response:
    """Liveness: 200 while the process is worth keeping (loading and draining included), 503 when the engine is dead or stuck."""
    alive, reason = context.manager.health()
    return json_response({"status": "ok" if alive else "unhealthy", "reason": reason}, 200 if alive else 503)


def ready(context: ServerContext) -> Response:
    """Readiness: 200 when requests are taken; else 503 with the phase and how far it is."""
    try:
        context.require_ready()
    except RootletError as error:
        progress = context.manager.progress
        body: dict[str, Any] = {"status": context.manager.status, "reason": error.message}
        if progress is not None and context.manager.status == "loading":
            body |= {"phase": progress.phase, "percent": round(100 * progress.done, 1), "detail": progress.detail, "elapsed_s": progress.elapsed_s}
        return json_response(body, 503, error_headers(error))
    alive, reason = context.manager.health()
    return json_response({"status": "ready" if alive else "unhealthy", "reason": reason}, 200 if alive else 503)


async def health_generate(context: ServerContext, request: Request) -> Response:
    """One real token when idle; when requests run, their progress is the answer, so that a probe never queues behind them."""
    context.require_ready()
    if context.meters.num_in_flight:
        alive, reason = context.manager.health()
        return json_response({"status": "busy" if alive else "unhealthy", "reason": reason}, 200 if alive else 503)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await until_gone(request, _probe(context))
    except TimeoutError:
        return json_response({"status": "unhealthy", "reason": f"no token within {PROBE_TIMEOUT_S:g} s"}, 503)
    return json_response({"status": "ok", "reason": "a token was generated"})


async def _probe(context: ServerContext) -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    req = GenerateReq(input_ids=(0,), sampling=sampling, rid=new_id("health-"))
    async with aclosing(metered(context, req)) as chunks:
        async for chunk in chunks:
            raise_failure(chunk.finish)


async def metrics(context: ServerContext) -> Response:
    """Prometheus text. Never fails because of the engine: its part is left out then."""
    state: dict[str, Any] = {}
    alive, _ = context.manager.health()
    if context.manager.status in ("ready", "draining"):
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                state = await context.manager.get_state("metrics")
        except (RootletError, TimeoutError):
            alive = False
    body = render(context.meters.registry, state, is_up=alive and context.manager.status == "ready")
    return Response(body, headers={"content-type": CONTENT_TYPE})


async def server_info(context: ServerContext) -> Response:
    """Configuration (without the key), capacity, and the engine's own counters once it is there."""
    config = dataclasses.asdict(context.config)
    config["server"]["api_key"] = bool(context.config.server.api_key)
    manager = context.manager
    info: dict[str, Any] = {
        "version": version("rootlet"), "status": manager.status, "config": config, "served_model_names": manager.served_names,
        "system_fingerprint": context.system_fingerprint, "num_open_requests": manager.num_open,
    }  # fmt: skip
    capacity = manager.ready_info
    if capacity is not None:
        info |= {name: getattr(capacity, name) for name in ("num_pages", "page_size", "max_rows", "max_context_len", "max_prompt_len", "vocab_size")}
        info |= {"memory_sum": capacity.memory_sum, "model": capacity.info, "max_total_num_tokens": capacity.num_pages * capacity.page_size}
    info["internal_states"] = [await manager.get_state("info")] if manager.status in ("ready", "draining") else []
    return json_response(info)


def model_info(context: ServerContext) -> Response:
    """The served model, under the keys that SGLang's clients read."""
    manager = context.manager
    capacity = manager.ready_info
    path = context.config.model.model
    info: dict[str, Any] = {
        "model_path": path or (manager.served_names[0] if manager.served_names else None),
        "tokenizer_path": path or (manager.served_names[0] if manager.served_names else None),
        "served_model_name": manager.served_names[0] if manager.served_names else None,
        "is_generation": True,
        "max_model_len": capacity.max_context_len if capacity else None,
        "preferred_sampling_params": manager.sampling_defaults if context.config.server.sampling_defaults == "model" else None,
        "weight_version": "default",
        "model": capacity.info if capacity else None,
    }
    return json_response(info)


async def flush_cache(context: ServerContext, request: Request) -> Response:
    """Forgets all cached prefixes once idle; `?timeout=` seconds to wait for that. Raises `HttpError` 400 when busy."""
    raw = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(raw)
    except ValueError:
        timeout_s = math.nan
    if not 0.0 <= timeout_s <= MAX_FLUSH_WAIT_S:
        raise InvalidValue("timeout", f"timeout must be seconds in [0, {MAX_FLUSH_WAIT_S:g}], got {show(raw)}")
    outcome = await until_gone(request, context.manager.flush_cache(timeout_s))
    if not outcome.success:
        raise HttpError(400, outcome.message or "the cache was not flushed: requests are running (wait for idle with ?timeout=)", code="cache_busy")
    return PlainTextResponse(outcome.message or "Cache flushed.\n")


def abort_request(context: ServerContext, fields: Fields) -> Response:
    """Ends one request by its exact id, or all. An unknown id is not an error: it may just have finished."""
    rid = fields.string("rid", max_chars=MAX_WIRE_RID_CHARS)
    abort_all = fields.boolean("abort_all")
    if not rid and not abort_all:
        raise InvalidValue("rid", "rid is required: the id of a request, or abort_all: true")
    context.manager.abort(rid, abort_all=abort_all)
    return json_response({"status": "ok"})


async def debug_state(context: ServerContext) -> Response:
    return json_response(await context.manager.get_state("state"))


async def debug_request(context: ServerContext, rid: str) -> Response:
    """One live or recently finished request, with what happened to it and why it waited. Raises `NotFound`."""
    state = await context.manager.get_state("request", rid=rid)
    found = state.get("request")
    if not found:
        error = NotFound(
            f"no request {show(rid)} is known to the engine: ask for one that runs or lately ended by the `id` of its reply", param="rid"
        )
        error.code = "request_not_found"
        raise error
    return json_response(found)


def root(context: ServerContext) -> Response:
    """What is here, for whoever opens the address."""
    manager = context.manager
    return json_response({
        "name": "rootlet", "version": version("rootlet"), "status": manager.status, "models": manager.served_names,
        "api": "/v1/chat/completions", "documentation": "/openapi.json", "metrics": "/metrics",
    })  # fmt: skip
