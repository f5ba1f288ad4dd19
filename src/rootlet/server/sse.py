"""Server-sent events as clients really read them: one JSON a line, LF only, a blank line after each, no `event:` or `id:` lines.

The first frame is pulled before any header is sent, so that what fails early has a real HTTP status. A comment keeps proxies awake, only after
`keepalive_s` of silence (a prefill that long opens the stream). A client that leaves, or that reads nothing for `stall_s`, ends the generator at
once and so gives back its pages; the connection of the latter is cut, since a polite close would wait for it to read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rootlet.core.clock import Clock
from rootlet.core.errors import RequestFailed, RootletError
from rootlet.server.body import ClientGone
from rootlet.server.context import ServerContext
from rootlet.server.errors import error_bytes
from rootlet.server.events import wait_gone

DONE = b"data: [DONE]\n\n"
ABORT = "rootlet.abort"  # ASGI extension of our own HTTP server: cuts the connection
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def frame(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


async def open_stream(request: Request, frames: AsyncGenerator[bytes, None], *, keepalive_s: float, stall_s: float, clock: Clock) -> Response:
    """A streaming response, once the first frame is there, or after `keepalive_s` without one. Owns `frames`.

    Raises what `frames` raises within that time, so that it becomes a status; `ClientGone`.
    """
    first = asyncio.ensure_future(_first(frames))
    gone = asyncio.ensure_future(wait_gone(request.receive))
    is_open = False
    try:
        either: set[asyncio.Future[Any]] = {first, gone}
        await asyncio.wait(either, timeout=keepalive_s or None, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            first.result()
        elif gone.done():
            raise ClientGone
        is_open = True
        return EventStream(first, frames, keepalive_s=keepalive_s, stall_s=stall_s, clock=clock)
    finally:
        gone.cancel()
        if not is_open:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await frames.aclose()


async def stream_reply(context: ServerContext, request: Request, frames: AsyncGenerator[bytes, None], *, keepalive_s: float) -> Response:
    """`open_stream` with the server's clock and its patience with readers that take nothing."""
    return await open_stream(request, frames, keepalive_s=keepalive_s, stall_s=context.config.server.stall_timeout, clock=context.clock)


async def _first(frames: AsyncGenerator[bytes, None]) -> bytes:
    async for item in frames:
        return item
    raise RequestFailed("the engine ended the request without an event")


class EventStream(Response):
    """Sends `first`, the rest of `frames`, and `[DONE]`. Two tasks: one pumps, one watches the client and the silence."""

    def __init__(
        self, first: asyncio.Future[bytes], frames: AsyncGenerator[bytes, None], *, keepalive_s: float, stall_s: float, clock: Clock
    ) -> None:
        """`keepalive_s`, `stall_s`: 0 = never."""
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._first = first
        self._frames = frames
        self._keepalive_s = keepalive_s
        self._stall_s = stall_s or math.inf
        self._clock = clock
        self._last_s = clock.now()
        self._sending = False

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        # Not the parent's: it would add a content length.
        self.raw_headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            elif self._is_stalled():
                scope.get("extensions", {}).get(ABORT, _leave_open)()
        finally:
            for task in (pump, watch, self._first):
                task.cancel()
            await asyncio.gather(pump, watch, self._first, return_exceptions=True)
            await self._frames.aclose()

    def _is_stalled(self) -> bool:
        return self._sending and self._clock.now() - self._last_s >= self._stall_s

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending = False
        self._last_s = self._clock.now()

    async def _pump(self, send: Send) -> None:
        with suppress(OSError):  # the connection broke under the write: the same as a client that left
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._send(send, await self._first)
                async for item in self._frames:
                    await self._send(send, item)
            except RootletError as error:
                await self._send(send, frame(error_bytes(error)))
            await self._send(send, DONE, more=False)

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Returns when the stream is to be given up."""
        gone = asyncio.ensure_future(wait_gone(receive))
        period_s = min(self._keepalive_s or math.inf, self._stall_s)
        try:
            while not gone.done():
                silent_s = self._clock.now() - self._last_s
                await asyncio.wait({gone}, timeout=None if math.isinf(period_s) else max(period_s - silent_s, period_s / 4))
                silent_s = self._clock.now() - self._last_s
                if gone.done() or self._is_stalled():
                    return
                if self._keepalive_s and not self._sending and silent_s >= self._keepalive_s:
                    await self._send(send, b": keep-alive\n\n")
        finally:
            gone.cancel()


def _leave_open() -> None:
    """Under another HTTP server the connection is its own business."""
