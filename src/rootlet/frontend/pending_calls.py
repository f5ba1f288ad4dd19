"""Questions to the scheduler that wait for their answer, by id. Asyncio, one loop; a timeout or a dead engine ends the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rootlet.core.errors import RootletError, Unavailable
from rootlet.core.ids import IdSource
from rootlet.ipc.messages import FlushCacheReqOutput, GetStateReqOutput

Answer = FlushCacheReqOutput | GetStateReqOutput


class PendingCalls:
    def __init__(self, ids: IdSource) -> None:
        self._ids = ids
        self._waiting: dict[str, asyncio.Future[Answer]] = {}

    async def call(self, ask: Callable[[str], None], timeout_s: float) -> Answer:
        """Send with a fresh id and wait. Raises `Unavailable` after `timeout_s`, or what `fail` was given."""
        req_id = self._ids.rid()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[req_id] = future
        try:
            ask(req_id)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise Unavailable(f"the scheduler did not answer within {timeout_s:g} s", code="engine_busy", retry_after_s=1.0) from None
        finally:
            self._waiting.pop(req_id, None)

    def answer(self, req_id: str, answer: Answer) -> None:
        future = self._waiting.get(req_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: RootletError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
