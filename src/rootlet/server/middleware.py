"""The one pure-ASGI layer around the router: path spelling, who may ask, request id, timing headers, HTTP metrics.

request  -> normalise path -> key, or else Host? -> web page? -> router
response <- X-Request-Id, openai-processing-ms, openai-version  <-  counted by route template and status
"""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rootlet.core.clock import Clock
from rootlet.core.ids import MAX_RID_CHARS, RID_CHARS
from rootlet.metrics import names
from rootlet.metrics.instruments import Instruments
from rootlet.server.auth import Keys, is_open
from rootlet.server.context import TENANT
from rootlet.server.errors import HttpError, error_response
from rootlet.server.origin import check_host, check_page

API_VERSION = b"2020-10-01"
_REQUEST_ID = re.compile(f"[{RID_CHARS}]{{1,{MAX_RID_CHARS}}}".encode())
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_BARE = ("/chat/completions", "/completions", "/models")


def normalise(path: str) -> str:
    """One spelling a route: no trailing slash, and `/v1` put before the OpenAI paths that came without it."""
    trimmed = path.rstrip("/") or "/"
    if trimmed in _BARE or trimmed.startswith("/models/"):
        return "/v1" + trimmed
    return trimmed


def request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The client's X-Request-Id if it is 1 to 128 letters, digits or `._:-`; else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return b"req_" + secrets.token_hex(16).encode()


class Front:
    """Wraps the router. Streams pass through untouched but for the headers of their first message. `bound` = --host."""

    def __init__(self, app: ASGIApp, *, keys: Keys, bound: str, meters: Instruments, clock: Clock) -> None:
        self._app = app
        self._keys = keys
        self._bound = bound
        self._meters = meters
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = self._clock.now()
        scope = {**scope, "path": normalise(scope["path"])}
        rid = request_id(scope["headers"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                elapsed_s = self._clock.now() - start_s
                self._count(scope, message["status"], elapsed_s)
                extra = [
                    (b"x-request-id", rid),
                    (b"openai-processing-ms", b"%d" % round(elapsed_s * 1000)),
                    (b"openai-version", API_VERSION),
                ]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        try:
            self._admit(scope)
        except HttpError as error:
            await error_response(error)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _admit(self, scope: Scope) -> None:
        """Raises `HttpError` 401 or 403. A page cannot know a key, so a server with keys may have any name."""
        if not is_open(scope["method"], scope["path"]):
            if self._keys:
                scope[TENANT] = self._keys.tenant(scope["headers"])
            else:
                check_host(scope, bound=self._bound)
        check_page(scope)

    def _count(self, scope: Scope, status: int, elapsed_s: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._meters.count(names.HTTP, route=route, method=method, status=str(status))
        self._meters.time(names.HTTP_SECONDS, elapsed_s, route=route)
