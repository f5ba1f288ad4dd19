"""What happened to a request, and why it waited in each tick: for `/debug/requests/RID` and `rootlet trace`.

Costs nothing per token: a request notes only its turning points. Why the queue did not move is noted once a tick for the whole queue
(`WaitLog`, runs of equal reasons coalesced), and cut out for one request when it is admitted or looked at. All of it is bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

MAX_EVENTS = 200
MAX_WAITS = 512
MAX_FINISHED = 512


@dataclass(slots=True)
class Wait:
    """Ticks [first, last] in which nobody more was admitted, for one reason; `why` with its numbers, of the last tick."""

    reason: str
    why: str
    first: int
    last: int


class WaitLog:
    """One note a tick at most. `reason` = that of the last tick with somebody waiting."""

    def __init__(self) -> None:
        self._waits: deque[Wait] = deque(maxlen=MAX_WAITS)
        self.reason = ""

    def note(self, tick: int, reason: str, why: str) -> None:
        self.reason = reason
        last = self._waits[-1] if self._waits else None
        if last is not None and last.reason == reason and last.last >= tick - 1:
            last.why, last.last = why, tick
        else:
            self._waits.append(Wait(reason, why, tick, tick))

    def between(self, first: int, last: int) -> list[dict[str, Any]]:
        """Why the queue stood still in ticks [first, last], oldest first."""
        found = []
        for wait in reversed(self._waits):
            if wait.last < first:
                break
            lo, hi = max(wait.first, first), min(wait.last, last)
            if lo <= hi:
                found.append({"reason": wait.reason, "why": wait.why, "first_tick": lo, "last_tick": hi, "ticks": hi - lo + 1})
        return found[::-1]


@dataclass(slots=True)
class Timeline:
    """Events of one request, in order. `queued_tick` = when it (re)entered the waiting queue, None while it is not there."""

    facts: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0
    queued_tick: int | None = None

    def note(self, tick: int, now_s: float, what: str, **detail: Any) -> None:
        """Beyond `MAX_EVENTS` the second half goes on, the oldest of it is forgotten first."""
        if len(self.events) >= MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
            self.num_dropped += 1
        self.events.append({"tick": tick, "time_s": now_s, "what": what, **detail})

    def dump(self) -> dict[str, Any]:
        """Plain values; times in seconds since the first event."""
        start_s = self.events[0]["time_s"] if self.events else 0.0
        events = [{**event, "time_s": round(event["time_s"] - start_s, 6)} for event in self.events]
        return {**self.facts, "dropped_events": self.num_dropped, "events": events}


class Finished:
    """Timelines of the requests that ended last, by rid."""

    def __init__(self) -> None:
        self._ring: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, rid: str, timeline: Timeline) -> None:
        self._ring.pop(rid, None)
        self._ring[rid] = timeline
        if len(self._ring) > MAX_FINISHED:
            self._ring.popitem(last=False)

    def get(self, rid: str) -> Timeline | None:
        return self._ring.get(rid)
