"""Errors on the wire: status, retry advice, and the one envelope of every route (`core.errors.envelope`).

Turns a `RootletError`, a terminal `Finish` of kind ERROR or ABORT, and the router's own 404 and 405 into a response. Never shows a traceback or a
path. Source: docs/api.md, "Errors".
"""

from __future__ import annotations

import math

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from rootlet.core.errors import Aborted, RequestFailed, RootletError, envelope, error_of
from rootlet.core.types import Finish, FinishKind

CLIENT_CLOSED = Aborted.status
RETRY_AFTER_S = 1.0

_TYPES = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "insufficient_scope"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: ("request_aborted", "aborted"),
    500: ("server_error", "internal_error"),
    501: ("not_supported_error", "unsupported"),
    503: ("unavailable_error", "unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}


class HttpError(RootletError):
    """An error that only exists on the wire (401, 404 of a path, 405, 415, 499), with its own headers."""

    def __init__(self, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None) -> None:
        kind, default_code = _TYPES.get(status, ("server_error" if status >= 500 else "invalid_request_error", "error"))
        super().__init__(message, code=code or default_code)
        self.status = status
        self.type = kind
        self.headers = headers or {}


def show(value: object, limit: int = 60) -> str:
    """A bad value for a message: its JSON-like form, cut to `limit` characters; containers are named, not printed."""
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    if isinstance(value, str) and len(value) > limit:
        return repr(value[:limit]) + f"... ({len(value)} characters)"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def raise_failure(finish: Finish | None) -> None:
    """Raises the error that a generation ended with; every other event passes. A failure is never reported as a finish reason."""
    if finish is not None and finish.kind in (FinishKind.ABORT, FinishKind.ERROR):
        raise error_of(finish)


def error_headers(error: RootletError) -> dict[str, str]:
    """Retry advice: Retry-After (whole seconds) and retry-after-ms on 429 and 503, `x-should-retry: false` where a retry cannot help."""
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if error.status in (429, 503):
        wait_s = error.retry_after_s if error.retry_after_s is not None else RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, round(wait_s * 1000)))
    elif error.status >= 501 or error.status == CLIENT_CLOSED:
        headers["x-should-retry"] = "false"
    return headers


def error_bytes(error: RootletError) -> bytes:
    # A message may quote a client's string; lone surrogates cannot reach here (bodies are strict UTF-8), file names could.
    return orjson.dumps(envelope(error))


def error_response(error: RootletError) -> Response:
    return Response(error_bytes(error), status_code=error.status, headers=error_headers(error), media_type="application/json")


async def on_rootlet_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RootletError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: unknown path 404, wrong method 405."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_response(HttpError(404, f"no route {show(request.url.path, 100)} (GET /openapi.json lists all)", code="route_not_found"))
    if error.status_code == 405:
        allowed = ", ".join(allowed_methods(request))
        message = f"{show(request.method)} is not allowed on {show(request.url.path, 100)}; use {allowed}"
        return error_response(HttpError(405, message, headers={"allow": allowed}))
    return error_response(HttpError(error.status_code, str(error.detail), headers=headers))


def allowed_methods(request: Request) -> list[str]:
    """The methods of all routes at this path (one route a method, so the router's own header knows only the first)."""
    routes = [r for r in request.app.router.routes if r.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for r in routes for method in r.methods or ()})


async def on_crash(_request: Request, _error: Exception) -> Response:
    """A bug of ours: the log has the traceback, the client gets only the request id (a header)."""
    return error_response(RequestFailed("internal error; the server's log has the details under this request's X-Request-Id"))
