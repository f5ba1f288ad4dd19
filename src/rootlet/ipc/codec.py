"""Messages to bytes and back: msgpack with tagged unions, one codec a direction. Nothing is ever unpickled.

A frame that does not decode to a message of its direction is dropped with one log line: random bytes on a socket harm nobody.
"""

from __future__ import annotations

import operator
from typing import Any, Generic, TypeVar

import msgspec

from rootlet.core.log import logger
from rootlet.ipc.messages import BatchTokenIDOutput, ToDetokenizer, ToScheduler, ToTokenizer

M = TypeVar("M")

_log = logger("ipc")

# What main reads: with an inline detokenizer the scheduler's token batches arrive there too.
ToMain = ToTokenizer | BatchTokenIDOutput


def _plain(value: Any) -> Any:
    """Numpy scalars inside messages become plain numbers, and a stray object in a state dump its text: a dump must not end a process."""
    if hasattr(value, "__index__"):
        return operator.index(value)
    if hasattr(value, "__float__"):
        return float(value)
    return str(value)


class Codec(Generic[M]):
    """Encodes any message; decodes those of one direction only."""

    def __init__(self, direction: Any, name: str) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(direction)
        self._name = name

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes) -> M | None:
        """The message, or None for a frame that is not one (logged, dropped)."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _log.warning("frame_dropped", channel=self._name, num_bytes=len(frame), error=str(error))
            return None


def scheduler_codec() -> Codec[ToScheduler]:
    return Codec(ToScheduler, "scheduler")


def detokenizer_codec() -> Codec[ToDetokenizer]:
    return Codec(ToDetokenizer, "detokenizer")


def main_codec() -> Codec[ToMain]:
    return Codec(ToMain, "main")
