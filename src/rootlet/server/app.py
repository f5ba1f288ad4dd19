"""Builds the ASGI application: routes, error handlers, the one middleware. Holds no request state and starts nothing.

FastAPI does routing and the OpenAPI document (its HTML pages are off: they load scripts from other hosts); every handler reads its body itself
(`body.py`) and answers with ready bytes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rootlet.config.resolve import api_keys
from rootlet.config.schema import RuntimeConfig
from rootlet.core.clock import Clock, SystemClock
from rootlet.core.errors import RootletError
from rootlet.metrics.instruments import Instruments
from rootlet.server import admin, control, native, tokenize
from rootlet.server.auth import Keys
from rootlet.server.body import ClientGone
from rootlet.server.context import ServerContext
from rootlet.server.door import Manager
from rootlet.server.errors import CLIENT_CLOSED, on_crash, on_http_exception, on_rootlet_error
from rootlet.server.middleware import Front
from rootlet.server.openai import chat, completions, models
from rootlet.server.openapi import ROUTE_DOCS
from rootlet.server.origin import GUARDED

Handler = Callable[[ServerContext, Request], Awaitable[Response]]


async def _on_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _tokenize(context: ServerContext, request: Request) -> Response:
    context.require_ready()
    return admin.json_response(await tokenize.tokenize(context, await context.read_fields(request)))


async def _detokenize(context: ServerContext, request: Request) -> Response:
    context.require_ready()
    return admin.json_response(await tokenize.detokenize(context, await context.read_fields(request)))


async def _abort(context: ServerContext, request: Request) -> Response:
    return admin.abort_request(context, await context.read_fields(request))


async def _models(context: ServerContext, _request: Request) -> Response:
    return admin.json_response(models.list_models(context))


async def _model(context: ServerContext, request: Request) -> Response:
    return admin.json_response(models.retrieve_model(context, request.path_params["model_id"]))


async def _debug_request(context: ServerContext, request: Request) -> Response:
    return await admin.debug_request(context, request.path_params["rid"])


def _plain(answer: Callable[[ServerContext], Response]) -> Handler:
    async def handler(context: ServerContext, _request: Request) -> Response:
        return answer(context)

    return handler


def _later(answer: Callable[[ServerContext], Awaitable[Response]]) -> Handler:
    async def handler(context: ServerContext, _request: Request) -> Response:
        return await answer(context)

    return handler


ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/v1/chat/completions", ("POST",), chat.create_chat_completion),
    ("/v1/completions", ("POST",), completions.create_completion),
    ("/v1/models", ("GET",), _models),
    ("/v1/models/{model_id:path}", ("GET",), _model),
    ("/generate", ("POST", "PUT"), native.generate),
    ("/tokenize", ("POST",), _tokenize),
    ("/detokenize", ("POST",), _detokenize),
    ("/health", ("GET",), _plain(admin.health)),
    ("/ready", ("GET",), _plain(admin.ready)),
    ("/health_generate", ("GET",), admin.health_generate),
    ("/metrics", ("GET",), _later(admin.metrics)),
    ("/server_info", ("GET",), _later(admin.server_info)),
    ("/get_server_info", ("GET",), _later(admin.server_info)),
    ("/model_info", ("GET",), _plain(admin.model_info)),
    ("/get_model_info", ("GET",), _plain(admin.model_info)),
    ("/flush_cache", ("GET", "POST"), admin.flush_cache),
    ("/abort_request", ("POST",), _abort),
    ("/pause_generation", ("POST",), control.pause_generation),
    ("/continue_generation", ("POST",), control.continue_generation),
    ("/cache/tree", ("GET",), control.cache_tree),
    ("/cache/stats", ("GET",), control.cache_stats),
    ("/cache/pin", ("POST",), control.cache_pin),
    ("/cache/unpin", ("POST",), control.cache_unpin),
    ("/debug/state", ("GET",), _later(admin.debug_state)),
    ("/debug/requests/{rid:path}", ("GET",), _debug_request),
    ("/", ("GET",), _plain(admin.root)),
)


def with_head(path: str, methods: tuple[str, ...]) -> tuple[str, ...]:
    """HEAD goes wherever GET only looks: balancers and monitors ask so. The server sends the headers of the GET and leaves the body out."""
    return (*methods, "HEAD") if "GET" in methods and path not in GUARDED else methods


def build_app(manager: Manager, config: RuntimeConfig, *, clock: Clock | None = None) -> ASGIApp:
    """The whole HTTP server as an ASGI application. The caller owns `manager` and runs the sockets."""
    clock = clock or SystemClock()
    meters = Instruments()
    context = ServerContext(manager=manager, config=config, meters=meters, clock=clock)
    app = FastAPI(title="Rootlet", version=version("rootlet"), redirect_slashes=False, docs_url=None, redoc_url=None)
    for path, methods, handler in ROUTES:
        for method in with_head(path, methods):
            _add_route(app, context, path, method, handler)
    app.add_exception_handler(RootletError, on_rootlet_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientGone, _on_gone)
    app.add_exception_handler(Exception, on_crash)
    return Front(app, keys=Keys(api_keys(config.server)), bound=config.server.host, meters=meters, clock=clock)


def _add_route(app: FastAPI, context: ServerContext, path: str, method: str, handler: Handler) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(context, request)

    words = re.sub(r":path|[{}]", "", path).strip("/").replace("/", "_") or "root"
    name = f"{method.lower()}_{words}"
    docs: dict[str, Any] = ROUTE_DOCS.get(path, {})
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=name,
        operation_id=name,
        summary=docs.get("summary"),
        response_model=None,
        include_in_schema=method != "HEAD",
        openapi_extra=docs.get("extra"),
    )
