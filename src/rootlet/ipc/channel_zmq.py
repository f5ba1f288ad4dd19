"""Channels between processes: ZeroMQ PUSH -> PULL over `ipc://` paths in a private directory (mode 0700). Never TCP, never pickle.

The receiver binds; senders connect, before or after. High-water marks are off: a send must never block the event loop or the tick.
Sockets belong to the thread that made them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

from rootlet.ipc.codec import Codec

M = TypeVar("M")

MAX_DRAIN = 1024  # messages a call; keeps one recv from starving the tick
LINGER_S = 2.0  # a process that ends still delivers its terminal messages, unless the peer is gone


def address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}"


def _bind(socket: zmq.Socket[Any], where: str) -> None:
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(where)


def _drain(socket: zmq.Socket[bytes], codec: Codec[M]) -> tuple[list[M], bool]:
    """(what has come, at most `MAX_DRAIN` frames; was that all?). Frames that cannot be decoded are skipped. Never waits."""
    messages: list[M] = []
    for _ in range(MAX_DRAIN):
        try:
            frame = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return messages, True
        message = codec.decode(frame)
        if message is not None:
            messages.append(message)
    return messages, False


class ZmqSender(Generic[M]):
    def __init__(self, where: str, codec: Codec[M], *, linger_s: float = LINGER_S) -> None:
        self._codec = codec
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, round(linger_s * 1000))
        self._socket.connect(where)

    def send(self, message: M) -> None:
        self._socket.send(self._codec.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class ZmqReceiver(Generic[M]):
    """Blocking side: scheduler and detokenizer."""

    def __init__(self, where: str, codec: Codec[M]) -> None:
        self._codec = codec
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        _bind(self._socket, where)

    def recv(self, timeout_s: float) -> list[M]:
        """What has come, at most `MAX_DRAIN` messages; waits up to `timeout_s` for the first. A frame that cannot be decoded is skipped."""
        # Not waiting is the case of every step: then no poll, whose setting up costs more than the look itself.
        if timeout_s > 0 and not self._socket.poll(round(timeout_s * 1000)):
            return []
        return _drain(self._socket, self._codec)[0]

    def close(self) -> None:
        self._socket.close()


class ZmqAsyncReceiver(Generic[M]):
    """Asyncio side: main. Make it inside the running loop."""

    def __init__(self, where: str, codec: Codec[M]) -> None:
        self._codec = codec
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        _bind(self._socket, where)
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._arrived.set)

    async def recv(self) -> list[M]:
        """What has come, at most `MAX_DRAIN` messages and at least one. Cancelling it loses nothing."""
        while True:
            # The descriptor stays readable from an arrival until the socket is asked, and asking until there is nothing makes it quiet: so what
            # comes after the drain sets the event again.
            await self._arrived.wait()
            self._arrived.clear()
            messages, is_empty = _drain(self._socket, self._codec)
            if not is_empty:
                self._arrived.set()
            if messages:
                return messages

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()
