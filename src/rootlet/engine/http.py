"""uvicorn on a socket that is already listening, with signals left to `launch` and an end that never hangs."""

from __future__ import annotations

import asyncio
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


MAX_HEAD_BYTES = 64 * 1024  # of a request line and its headers, and of the trailers behind a body


def _refusal(status: bytes, message: str, code: str) -> bytes:
    """A whole response in the one error shape, for what never becomes a request."""
    error = InvalidValue(None, message)
    error.status, error.code = int(status[:3]), code
    body = orjson.dumps(envelope(error))
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body


_NO_HTTP = _refusal(b"400 Bad Request", "the request is not valid HTTP", "invalid_http")
_TOO_LONG = _refusal(
    b"431 Request Header Fields Too Large", f"the request line and headers are longer than {MAX_HEAD_BYTES // 1024} KiB", "headers_too_large"
)
_TOO_SLOW = _refusal(b"408 Request Timeout", "the rest of the request did not come in time (--keep-alive)", "request_timeout")


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
    """What ASGI has no words for: answers to bytes that are no request or never become one, the end of a connection whose peer reads nothing or
    has left while others of its requests wait, and the way a reply ends for an old client."""

    _in_head = True  # of the next request, or of one whose headers are on their way
    _arriving = True  # the rest of a request is on its way
    _dry_bytes = 0  # of a request, since it began or since its last piece of body
    _heard_s = 0.0
    _patience: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(_NO_HTTP)

    def _refuse(self, response: bytes) -> None:
        if self._running is None or self._running.response_complete or not self._running.response_started:
            self.transport.write(response)
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        self._patience = self.loop.call_later(self.timeout_keep_alive, self._lose_patience)

    def connection_lost(self, exc: Exception | None) -> None:
        """All of the connection's requests have lost their client, not only the one that came last."""
        super().connection_lost(exc)
        if self._patience is not None:
            self._patience.cancel()
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def _lose_patience(self) -> None:
        """A peer that began a connection or a request and then says nothing has gone, or never meant it."""
        silent_s = self.loop.time() - self._heard_s
        if self._arriving and not self.flow.read_paused and silent_s >= self.timeout_keep_alive:
            self._refuse(_TOO_SLOW)
            return
        self._patience = self.loop.call_later(max(self.timeout_keep_alive - silent_s, self.timeout_keep_alive / 4), self._lose_patience)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self.loop.time()
        self._dry_bytes += len(data)
        super().data_received(data)
        if self._arriving and self._dry_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._arriving, self._dry_bytes = True, True, 0
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers: nobody wants them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if not self.pipeline:  # not queued behind another one
            self._running = self.cycle
        if self.parser.get_http_version() == "1.0" and self.cycle is not None:
            self.cycle.__class__ = _Http10Cycle

    def on_body(self, body: bytes) -> None:
        self._dry_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()


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
