"""Reasons to hold prefill back for a while although there is room: `min_free_slots` and `decode_interval`. Both are off by default.

Both hold only while somebody decodes or runs, whose steps end the wait: `min_free_slots` until enough of them have ended, `decode_interval` until
the rest of the N decode steps were launched. So each is bounded by itself and nothing can stall (I8). Source: scheduler.md 2.2, 2.6.
"""

from __future__ import annotations

from rootlet.config.schema import SchedulerArgs
from rootlet.scheduler.queue import Queues


class PrefillDelay:
    """One instance a scheduler; told of each launched step."""

    def __init__(self, args: SchedulerArgs, *, max_rows: int) -> None:
        self._interval = args.decode_interval
        self._min_free = min(args.min_free_slots, max_rows)
        self._max_rows = max_rows
        self._decodes_due = 0

    def launched(self, *, prefill: bool, decode: bool) -> None:
        """A mixed step is both: decoding went on, so nothing is due."""
        if prefill:
            self._decodes_due = 0 if decode else self._interval
        elif decode:
            self._decodes_due = max(self._decodes_due - 1, 0)

    def all_prefill(self, queues: Queues) -> str:
        """Why no prefill step may be made now, unfinished chunks included; "" = it may."""
        if self._decodes_due and queues.decodable():
            return f"{self._decodes_due} decode steps are due first; --decode-interval is {self._interval}"
        return ""

    def admission(self, queues: Queues) -> str:
        """Why no new request may be admitted now; "" = it may. Never while a chunk is in progress, which holds its row anyway."""
        free = self._max_rows - queues.num_running
        if queues.num_running and not queues.prefill and free < self._min_free:
            return f"{free} rows are free; --min-free-slots is {self._min_free}"
        return ""
