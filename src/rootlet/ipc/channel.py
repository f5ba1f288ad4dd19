"""What a channel is: one direction, many senders, one receiver, in order for each sender, never lost while both ends live.

A send never blocks (what is in flight is bounded by the requests that the front admits). `recv` hands over all that is there.
Implementations: `channel_zmq` (between processes), `channel_inproc` (between threads).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

S_contra = TypeVar("S_contra", contravariant=True)
R = TypeVar("R")


class Sender(Protocol[S_contra]):
    def send(self, message: S_contra) -> None:
        """Never blocks. After the peer's death the message is dropped silently; the supervisor tells of deaths."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol[R]):
    def recv(self, timeout_s: float) -> list[R]:
        """Everything that arrived, oldest first; waits at most `timeout_s` for the first message; [] = nothing came."""
        ...

    def close(self) -> None: ...


class AsyncReceiver(Protocol[R]):
    async def recv(self) -> list[R]:
        """Everything that arrived, at least one message. Cancelling it loses nothing."""
        ...

    def close(self) -> None: ...
