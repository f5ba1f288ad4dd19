"""From what the cache records to what routers read: the payload of a batch, and the publisher that carries it, for as long as a scheduler runs.

    [time (Unix seconds), [event, ...], data parallel rank]          msgpack; an event is a map with its name under "type"

A block's hash is sent as the last 8 bytes of the chained sha256, as an unsigned integer. Source: the payload of vLLM's KV events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from rootlet.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent
from rootlet.config.schema import CacheArgs
from rootlet.ipc.kv_event_channel import KVEventPublisher

FULL_ATTENTION = "full_attention"
RANK = 0

_encode = msgspec.msgpack.Encoder().encode


def wire_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def wire_event(event: KVEvent) -> dict[str, Any]:
    """The map of one event. `group_idx` and the kind say "the only group, full attention": routers pass over stored blocks without them."""
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": _hashes(event.block_hashes),
                "parent_block_hash": None if event.parent_block_hash is None else wire_hash(event.parent_block_hash),
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": event.lora_name,
                "group_idx": 0,
                "kv_cache_spec_kind": FULL_ATTENTION,
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": _hashes(event.block_hashes), "medium": event.medium, "group_idx": 0}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _hashes(hashes: Sequence[bytes]) -> list[int]:
    return [wire_hash(block_hash) for block_hash in hashes]


class KVEventSink:
    """What the scheduler is handed: encodes, passes on, counts. Never blocks."""

    def __init__(self, publisher: KVEventPublisher, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._publisher = publisher
        self._wall_clock = wall_clock

    def publish(self, batch: EventBatch) -> None:
        self._publisher.publish(batch.sequence, _encode((self._wall_clock(), [wire_event(event) for event in batch.events], RANK)))

    def stats(self) -> dict[str, int]:
        return {"published_batches": self._publisher.published, "dropped_batches": self._publisher.dropped}


@contextlib.contextmanager
def kv_event_sink(cache: CacheArgs) -> Iterator[KVEventSink | None]:
    """The sink that the configuration asks for, or None; closed at the end of the block. Raises `BadConfig` for an endpoint that cannot be had."""
    if cache.kv_events is None:
        yield None
        return
    publisher = KVEventPublisher(cache.kv_events, replay_endpoint=cache.kv_events_replay, topic=cache.kv_events_topic)
    try:
        yield KVEventSink(publisher)
    finally:
        publisher.close()
