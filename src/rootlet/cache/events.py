"""KV events: what the tree holds, told to routers outside as blocks (one a page) that come and go.

    stored   new blocks in order, each the child of the one before, the first of `parent_block_hash` (None: of the root of a namespace)
    removed  the blocks of one node            cleared  all of them

A block's hash is sha256 over its parent's hash and its tokens; the first parent is a seed made of the namespace's parts, each with its length
before it, so equal tokens of two salts, or of ("a", "bc") and ("ab", "c"), never meet. Splits and lost windows or states are silent: they
change no block. `stored` minus `removed` is at any time what a match can find of full attention.

Owns the sequence numbers and the last batches, for subscribers that missed some. Does not send anything. Source: vLLM's KV events; cache.md 2.13.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from rootlet.cache.key import normalise
from rootlet.core.types import Namespace

DEVICE = "GPU"  # the word that routers know for the first tier, whatever device it is
HOST = "CPU"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """`token_ids` of all blocks, `block_size` each. `lora_name` tells the router whose KV it is; other parts of the namespace are in the hashes."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_name: str | None = None
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: tuple[bytes, ...]
    medium: str = DEVICE


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is held any more, on any tier."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """`sequence` grows by one a batch; a gap means that the subscriber missed something."""

    sequence: int
    events: tuple[KVEvent, ...]


class EventSink(Protocol):
    """Where batches go. Must not block, nor call back."""

    def publish(self, batch: EventBatch) -> None: ...

    def stats(self) -> dict[str, int]:
        """Counts since the start, for metrics."""
        ...


class EventRecorder:
    """`replay_batches`: how many batches can still be had by `replay`."""

    __slots__ = ("_pending", "_sent", "next_sequence")

    def __init__(self, *, replay_batches: int = 10_000) -> None:
        self._pending: list[KVEvent] = []
        self._sent: deque[EventBatch] = deque(maxlen=replay_batches)
        self.next_sequence = 0

    def record(self, event: KVEvent) -> None:
        """Blocks that go on where the last event ended join it."""
        last = self._pending[-1] if self._pending else None
        if isinstance(event, BlockStored) and isinstance(last, BlockStored) and _goes_on(last, event):
            joined = replace(last, block_hashes=last.block_hashes + event.block_hashes, token_ids=last.token_ids + event.token_ids)
            self._pending[-1] = joined
        else:
            self._pending.append(event)

    def take(self) -> EventBatch | None:
        """What was recorded since the last call, numbered; None when that is nothing."""
        if not self._pending:
            return None
        batch = EventBatch(self.next_sequence, tuple(self._pending))
        self._pending.clear()
        self.next_sequence += 1
        self._sent.append(batch)
        return batch

    def replay(self, sequence: int) -> tuple[EventBatch, ...]:
        """Batches from `sequence` on that are still kept; a first one that is later says how many are lost."""
        return tuple(batch for batch in self._sent if batch.sequence >= sequence)


def seed(namespace: Namespace) -> bytes:
    """The hash above all first blocks of a namespace."""
    parts = [(part or "").encode() for part in normalise(namespace)]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def chain(parent: bytes, data: bytes, *, block_bytes: int) -> list[bytes]:
    """One hash for each `block_bytes` of the packed tokens `data`, each over its parent's hash and its own bytes."""
    hashes = []
    for at in range(0, len(data), block_bytes):
        parent = hashlib.sha256(parent + data[at : at + block_bytes]).digest()
        hashes.append(parent)
    return hashes


def _goes_on(last: BlockStored, event: BlockStored) -> bool:
    return event.parent_block_hash == last.block_hashes[-1] and (event.lora_name, event.medium) == (last.lora_name, last.medium)
