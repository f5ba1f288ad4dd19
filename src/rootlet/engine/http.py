"""uvicorn on a socket that is already listening, with signals left to `launch` and an end that never hangs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rootlet.config.schema import ServerArgs
from rootlet.core.errors import InvalidValue, envelope
from rootlet.engine.listen import BACKLOG

ABORT_EXTENSION = "rootlet.abort"

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent


_INVALID_HTTP = InvalidValue(None, "the request is not valid HTTP")
_INVALID_HTTP.code = "invalid_http"
_MALFORMED = orjson.dumps(envelope(_INVALID_HTTP))


class _Http10Cycle(RequestResponseCycle):
    """HTTP/1.0 knows no chunks (uvicorn sends them anyway): a body of unknown length ends with the connection."""

    _open_ended = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._open_ended = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = False if self._open_ended else None
        elif message["type"] == "http.response.body" and self._open_ended:
            self.expected_content_length = len(message.get("body", b"")) + bool(message.get("more_body", False))
        await super().send(message)


class _Protocol(HttpToolsProtocol):
    """Three things that ASGI has no words for: the answer to bytes that are no HTTP, the end of a connection whose peer reads nothing, and
    the way a reply ends for an old client."""

    def send_400_response(self, msg: str) -> None:
        """The one error shape, before the bytes ever become a request."""
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(_MALFORMED)
        self.transport.write(head + _MALFORMED)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0" and self.cycle is not None:
            self.cycle.__class__ = _Http10Cycle


class HttpServer(uvicorn.Server):
    """`stop(flush_s)`: no new connections; open replies may finish for `flush_s` seconds, then they are cut."""

    def __init__(self, app: ASGIApp, args: ServerArgs) -> None:
        super().__init__(
            uvicorn.Config(
                cast("ASGI3Application", app),
                http=_Protocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=args.keep_alive,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the launcher's: draining is more than closing connections."""
        yield

    async def run_on(self, sock: socket.socket) -> None:
        await self.serve([sock])

    def stop(self, flush_s: float) -> None:
        self.config.timeout_graceful_shutdown = max(1, round(flush_s))
        self.should_exit = True
