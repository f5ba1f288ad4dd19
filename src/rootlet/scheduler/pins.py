"""Prefixes that an operator keeps in the cache for a while: a lock with a time limit, held by nobody's request.

A pin keeps what is cached at that moment (whole pages) from being evicted; it brings nothing into the cache. Pins yield, oldest first, when a
request could otherwise never run, and all of them end with a flush. Bounded in number. Time comes from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rootlet.cache.types import RadixKey, TreeLock
from rootlet.core.types import Namespace
from rootlet.ipc.messages import PinReq
from rootlet.scheduler.kv_owner import KvOwner

MAX_PINS = 256


@dataclass(frozen=True, slots=True)
class Pin:
    """`length` tokens, kept until `until_s` on the scheduler's clock."""

    lock: TreeLock
    length: int
    until_s: float


class Pins:
    """In order of their making."""

    def __init__(self, kv: KvOwner) -> None:
        self._kv = kv
        self._pins: dict[str, Pin] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._pins)

    def locks(self) -> list[TreeLock]:
        return [pin.lock for pin in self._pins.values()]

    def handle(self, msg: PinReq, now_s: float) -> dict[str, Any]:
        """Do what the message says; the answer as plain values, with "error" for a pin that cannot be."""
        if msg.action == "unpin":
            ids = list(self._pins) if msg.pin_id is None else [msg.pin_id]
            return {"unpinned": [pin_id for pin_id in ids if self._release(pin_id)]}
        if msg.action == "list":
            pins = self._pins.items()
            return {"pins": [{"pin_id": pin_id, "tokens": pin.length, "ttl_s": round(pin.until_s - now_s, 3)} for pin_id, pin in pins]}
        if len(self._pins) >= MAX_PINS:
            return {"error": f"{MAX_PINS} prefixes are pinned already, which is the limit: unpin one first"}
        return self._pin(msg, now_s)

    def _pin(self, msg: PinReq, now_s: float) -> dict[str, Any]:
        key = RadixKey(Namespace(msg.lora_id or None, msg.extra_key or None, msg.cache_salt or None), msg.input_ids[: len(msg.input_ids) // 4 * 4])
        locked = self._kv.lock_prefix(key)
        if locked.prefix_len == 0:
            self._kv.unlock(locked)
            return {"pin_id": None, "tokens": 0, "of": len(key)}
        self._count += 1
        pin_id = f"pin-{self._count}"
        self._pins[pin_id] = Pin(locked.lock, locked.prefix_len, now_s + msg.ttl_s)
        return {"pin_id": pin_id, "tokens": locked.prefix_len, "of": len(key), "ttl_s": msg.ttl_s}

    def _release(self, pin_id: str) -> bool:
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._kv.cache.dec_lock_ref(pin.lock)
        return pin is not None

    def expire(self, now_s: float) -> None:
        for pin_id in [pin_id for pin_id, pin in self._pins.items() if pin.until_s <= now_s]:
            self._release(pin_id)

    def yield_oldest(self) -> bool:
        """Give one up, for a request that finds no pages; False when there is none."""
        return bool(self._pins) and self._release(next(iter(self._pins)))

    def clear(self) -> None:
        while self.yield_oldest():
            pass
