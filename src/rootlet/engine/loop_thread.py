"""An event loop in a thread of its own, and the two ways into it: wait for a result in a thread, or await it on another loop.

Owns loop and thread. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from rootlet.core.errors import Unavailable

T = TypeVar("T")


class LoopThread:
    """Runs from construction until `close`. A task group's failure arrives as the first error in it."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Blocks the calling thread, which must not be the loop's. Raises `Unavailable` once closed.

        An interrupted wait (Ctrl-C) cancels `work`, and `work` is over before the interruption goes on: what it held can be closed then.
        """
        self._check_open(work)
        started: list[asyncio.Task[Any]] = []
        noted, future = _noted(work, started), None
        try:  # around the handing over too: it lets other threads run, so an interruption often comes just there
            future = asyncio.run_coroutine_threadsafe(noted, self._loop)
            return future.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if future is None or not future.done():
                asyncio.run_coroutine_threadsafe(_ended(started), self._loop).result()
                noted.close()  # both: never handed over, or over already
                work.close()

    async def awaited(self, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, from a coroutine on any loop. Cancelling it cancels `work`."""
        self._check_open(work)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def close(self) -> None:
        """Ends the loop and its thread. Once."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _check_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self._loop.is_closed():
            work.close()
            raise Unavailable("the engine is closed", code="engine_dead")


async def _noted(work: Coroutine[Any, Any, T], started: list[asyncio.Task[Any]]) -> T:
    task = asyncio.current_task()
    assert task is not None
    started.append(task)
    return await work


async def _ended(started: list[asyncio.Task[Any]]) -> None:
    """Runs after `_noted` has begun: the loop keeps the order in which a thread hands work over."""
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
