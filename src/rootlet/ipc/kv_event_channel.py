"""KV events to whoever routes requests outside: a PUB socket, and a ROUTER socket where the last batches can be had again.

    PUB     topic | sequence | payload                               sequence: 8 bytes, big endian
    ROUTER  asked: first sequence (8 bytes, big endian); answers: topic | sequence | payload for each batch kept, then "" | END | ""

Both sockets live in a thread of their own; `publish` hands over and never waits: when `MAX_WAITING` batches wait already, the new one is dropped,
counted, and its sequence number is missing. A subscriber that does not read loses batches in its own queue and holds up nobody; one that is gone
without a word is noticed by heartbeats. Source: the frames of vLLM's KV events.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import zmq

from rootlet.core.errors import BadConfig
from rootlet.core.log import logger

MAX_WAITING = 1024
REPLAY_BATCHES = 10_000
REPLAY_BYTES = 64 * 2**20
SUBSCRIBER_BATCHES = 4096  # for one subscriber that does not read
END = (-1).to_bytes(8, "big", signed=True)

_STOP = b"stop"
_MAX_REQUEST_BYTES = 4096
_HEARTBEAT_MS, _GONE_MS = 10_000, 30_000
_LINGER_MS = 200

_log = logger("kv_events")


class Kept:
    """The last batches, by number and by bytes."""

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._batches: deque[tuple[bytes, bytes]] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def add(self, sequence: bytes, payload: bytes) -> None:
        self._batches.append((sequence, payload))
        self.num_bytes += len(payload)
        while len(self._batches) > self._max_batches or self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: bytes) -> list[tuple[bytes, bytes]]:
        """Equally long big-endian numbers compare as their bytes do."""
        return [batch for batch in self._batches if batch[0] >= sequence]


class KVEventPublisher:
    """Binds both endpoints; raises `BadConfig` when one cannot be had. `published` and `dropped` count batches. One thread calls it."""

    def __init__(self, endpoint: str, *, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._topic = topic.encode()
        self._kept = Kept(max_batches=REPLAY_BATCHES, max_bytes=REPLAY_BYTES)
        self.published = self.dropped = 0
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._bound(zmq.PUB, endpoint, "--kv-events", SUBSCRIBER_BATCHES)
            self._replay = None if replay_endpoint is None else self._bound(zmq.ROUTER, replay_endpoint, "--kv-events-replay", REPLAY_BATCHES + 2)
        except BadConfig:
            self._close_sockets()
            raise
        where = f"inproc://kv-events-{id(self)}"
        self._inbox = self._socket(zmq.PULL, 1)
        self._inbox.bind(where)
        self._door: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._door.setsockopt(zmq.SNDHWM, MAX_WAITING)
        self._door.connect(where)
        self._thread = threading.Thread(target=self._run, name="rootlet-kv-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, high_water: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, high_water)
        socket.setsockopt(zmq.RCVHWM, high_water)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        return socket

    def _bound(self, kind: int, endpoint: str, knob: str, high_water: int) -> zmq.Socket[Any]:
        socket = self._socket(kind, high_water)
        for option, value in (
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _GONE_MS),
            (zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES),
            (zmq.IPV6, int("[" in endpoint)),
        ):
            socket.setsockopt(option, value)
        try:
            socket.bind(endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            raise BadConfig(f"{knob} {endpoint}: cannot listen there ({error})") from None
        _log.info("bound", knob=knob, endpoint=endpoint)
        return socket

    def publish(self, sequence: int, payload: bytes) -> None:
        """Never blocks. Sequences grow by one from call to call."""
        try:
            self._door.send_multipart((sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            self.published += 1
        except zmq.Again:
            self.dropped += 1

    def close(self) -> None:
        """What was published goes out, if somebody takes it at once. Idempotent."""
        if self._door.closed:
            return
        self._door.setsockopt(zmq.SNDTIMEO, 1000)
        try:
            self._door.send_multipart((_STOP, b""))
            self._thread.join()
        except zmq.Again:
            _log.warning("publisher_stuck")
        self._door.close(linger=0)

    # ---- the thread: it alone uses the sockets from here on ------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        goes_on = True
        while goes_on:
            ready = dict(poller.poll())
            if self._inbox in ready:
                goes_on = self._forward()
            elif self._replay is not None and self._replay in ready:  # once nothing waits: an answer holds all that was published before
                self._answer(self._replay)
        self._close_sockets()

    def _forward(self) -> bool:
        sequence, payload = self._inbox.recv_multipart()
        if sequence == _STOP:
            return False
        self._kept.add(sequence, payload)
        self._pub.send_multipart((self._topic, sequence, payload))  # a PUB socket never waits
        return True

    def _answer(self, replay: zmq.Socket[Any]) -> None:
        """Batches for one that missed some. A request that is no sequence number gets the end at once; who does not read the answer loses it."""
        *envelope, asked = replay.recv_multipart()
        for sequence, payload in self._kept.since(asked) if len(asked) == 8 else ():
            replay.send_multipart((*envelope, self._topic, sequence, payload))
        replay.send_multipart((*envelope, b"", END, b""))

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
