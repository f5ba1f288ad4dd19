"""uvicorn on a socket that is already listening, with signals left to `launch` and an end that never hangs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rootlet.config.schema import ServerArgs
from rootlet.engine.listen import BACKLOG

ABORT_EXTENSION = "rootlet.abort"

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application


MALFORMED = b'{"error":{"message":"the request is not valid HTTP","type":"invalid_request_error","param":null,"code":"invalid_http","status":400}}'


class _Protocol(HttpToolsProtocol):
    """Two things that ASGI has no words for: the answer to bytes that are no HTTP, and the end of a connection whose peer reads nothing."""

    def send_400_response(self, msg: str) -> None:
        """The one error shape, before the bytes ever become a request."""
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(MALFORMED)
        self.transport.write(head + MALFORMED)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]


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
