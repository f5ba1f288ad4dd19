"""An interrupted wait leaves nothing half done: what it waited for is over, and what that held can be closed."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator

import pytest

from rootlet.core.errors import Unavailable
from rootlet.engine.loop_thread import LoopThread


def test_ctrl_c_ends_the_work_before_the_wait() -> None:
    loop = LoopThread("test")
    begun, ended = threading.Event(), []

    async def endless() -> AsyncIterator[int]:
        try:
            begun.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def close() -> None:
        await chunks.aclose()  # type: ignore[attr-defined]

    def interrupt() -> None:
        begun.wait()
        signal.pthread_kill(main, signal.SIGINT)

    chunks, main = endless(), threading.get_ident()
    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(_next(chunks))
    killer.join()
    assert ended == [True]
    loop.run(close())  # would say "already running"
    loop.close()
    with pytest.raises(Unavailable):
        loop.run(_next(chunks))


async def _next(chunks: AsyncIterator[int]) -> int:
    return await anext(chunks)
