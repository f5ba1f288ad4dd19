"""An interrupted wait leaves nothing half done: what it waited for is over, and what that held can be closed."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

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


@pytest.mark.parametrize("handed_over", [True, False])
def test_ctrl_c_while_the_work_is_handed_over_ends_it_too(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, handed_over: bool
) -> None:
    loop, calls, events = LoopThread("test"), [], []
    real = asyncio.run_coroutine_threadsafe

    async def work() -> None:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    def interrupted(coroutine: Any, running: asyncio.AbstractEventLoop) -> Any:
        calls.append(coroutine)
        if len(calls) == 1:
            if handed_over:
                real(coroutine, running)
            raise KeyboardInterrupt
        return real(coroutine, running)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert events == (["begun", "ended"] if handed_over else [])
    loop.close()
    gc.collect()
    assert [str(w.message) for w in recwarn] == [], "no coroutine is left unawaited"


async def _next(chunks: AsyncIterator[int]) -> int:
    return await anext(chunks)
