"""Channels between processes: ZeroMQ PUSH -> PULL over `ipc://` paths in a private directory (mode 0700). Never TCP, never pickle.

The receiver binds; senders connect, before or after. High-water marks are off: a send must never block the event loop or the tick.
Sockets belong to the thread that made them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from rootlet.ipc.codec import Codec

M = TypeVar("M")

MAX_DRAIN = 1024  # messages a call; keeps one recv from starving the tick
LINGER_S = 2.0  # a process that ends still delivers its terminal messages, unless the peer is gone


def address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}"


def _pull(context: zmq.Context[zmq.Socket[bytes]], where: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(where)
    return socket


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
        self._socket = _pull(zmq.Context.instance(), where)

    def recv(self, timeout_s: float) -> list[M]:
        """What has come, at most `MAX_DRAIN` messages; waits up to `timeout_s` for the first. A frame that cannot be decoded is skipped."""
        if not self._socket.poll(max(0, round(timeout_s * 1000))):
            return []
        messages: list[M] = []
        for _ in range(MAX_DRAIN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._codec.decode(frame)
            if message is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()


class ZmqAsyncReceiver(Generic[M]):
    """Asyncio side: main. Make it inside the running loop."""

    def __init__(self, where: str, codec: Codec[M]) -> None:
        self._codec = codec
        self._context = zmq.asyncio.Context.shadow(zmq.Context.instance())
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(where)

    async def recv(self) -> list[M]:
        while True:
            await self._socket.poll()
            messages = self._drain()
            if messages:
                return messages

    def _drain(self) -> list[M]:
        messages: list[M] = []
        raw: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        for _ in range(MAX_DRAIN):
            try:
                frame = raw.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._codec.decode(frame)
            if message is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        self._socket.close()
