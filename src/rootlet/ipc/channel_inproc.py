"""Channels between threads of one process: the same contract over a queue, messages handed over as they are (they are frozen)."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from typing import Generic, TypeVar

M = TypeVar("M")


class InprocChannel(Generic[M]):
    """Sender and blocking receiver. Any thread may send; one thread receives."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[M] = queue.SimpleQueue()

    def send(self, message: M) -> None:
        self._queue.put(message)

    def recv(self, timeout_s: float) -> list[M]:
        messages: list[M] = []
        try:
            messages.append(self._queue.get(timeout_s > 0, timeout_s if timeout_s > 0 else None))
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages

    def close(self) -> None:
        """Nothing to give back: the queue lives as long as its users."""


class InprocAsyncChannel(Generic[M]):
    """Sender (any thread) and asyncio receiver (the loop it was made for)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[M] = deque()
        self._lock = threading.Lock()
        self._arrived = asyncio.Event()
        self._closed = False

    def send(self, message: M) -> None:
        with self._lock:
            if self._closed:
                return
            first = not self._messages
            self._messages.append(message)
            if first:  # the receiver takes all at once, so one wake-up serves the whole backlog
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def recv(self) -> list[M]:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                messages = list(self._messages)
                self._messages.clear()
            if messages:
                return messages

    def close(self) -> None:
        """Later sends are dropped, so that a thread that outlives the loop does no harm."""
        with self._lock:
            self._closed = True
