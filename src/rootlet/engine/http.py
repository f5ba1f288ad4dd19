"""uvicorn on a socket that is already listening, with signals left to `launch` and an end that never hangs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import uvicorn
from starlette.types import ASGIApp

from rootlet.config.schema import ServerArgs
from rootlet.engine.listen import BACKLOG

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application


class HttpServer(uvicorn.Server):
    """`stop(flush_s)`: no new connections; open replies may finish for `flush_s` seconds, then they are cut."""

    def __init__(self, app: ASGIApp, args: ServerArgs) -> None:
        super().__init__(
            uvicorn.Config(
                cast("ASGI3Application", app),
                http="httptools",
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
