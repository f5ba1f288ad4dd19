"""How fast plain Python runs right now: a fixed loop around each measurement, so that a machine that drifts shows, and rounds that interleave ours
and a peer's (A B A B). Times are microseconds; medians are what is quoted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOOPS = 20_000

Measure = Callable[[], list[float]]
"""One round: microseconds of each of its calls."""


class Pace:
    """`take` runs the loop once, about a millisecond."""

    def __init__(self) -> None:
        self.taken_us: list[float] = []

    def take(self) -> float:
        begin, total = time.perf_counter(), 0
        for i in range(LOOPS):
            total += i & 7
        self.taken_us.append(1e6 * (time.perf_counter() - begin))
        return self.taken_us[-1]

    def best_us(self) -> float:
        return min(self.taken_us)


@dataclass(frozen=True, slots=True)
class Operation:
    """What is measured: our way, and the peer's where it has one. `target_us` None = no target was set."""

    name: str
    target_us: float | None
    ours: Measure
    theirs: Measure | None = None


@dataclass(slots=True)
class Row:
    """All calls of all rounds. `pace_us` = the fixed loop around them."""

    name: str
    target_us: float | None
    ours_us: list[float] = field(default_factory=list)
    theirs_us: list[float] = field(default_factory=list)
    pace_us: list[float] = field(default_factory=list)

    @property
    def is_missed(self) -> bool:
        return self.target_us is not None and statistics.median(self.ours_us) > self.target_us

    def slowdown(self, best_us: float) -> float:
        """The fixed loop around this row over the fastest of the run: 1 = undisturbed."""
        return statistics.median(self.pace_us) / best_us


def measure(operation: Operation, pace: Pace, *, rounds: int) -> Row:
    """Interleaved rounds, the loop around each; one round before that is not counted."""
    row = Row(operation.name, operation.target_us)
    operation.ours()
    for _ in range(rounds):
        row.pace_us.append(pace.take())
        row.ours_us += operation.ours()
        row.pace_us.append(pace.take())
        if operation.theirs is not None:
            row.theirs_us += operation.theirs()
            row.pace_us.append(pace.take())
    return row


def times_us(work: Callable[[], object], number: int, *, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Of `number` single calls; the clock's own cost, 0.1 us and for CPU clocks more, is in them."""
    times = []
    for _ in range(number):
        begin = clock()
        work()
        times.append(1e6 * (clock() - begin))
    return times


def cells(row: Row, best_us: float) -> tuple[str, ...]:
    """Columns of a table: operation, target, ours, verdict, peer, ratio, slowdown."""
    ours = statistics.median(row.ours_us)
    p90 = statistics.quantiles(row.ours_us, n=10)[-1]
    met = "" if row.target_us is None else f"MISSED {ours / row.target_us:.2f}x" if row.is_missed else "met"
    target = "" if row.target_us is None else f"{row.target_us:.0f}"
    peer = statistics.median(row.theirs_us) if row.theirs_us else None
    theirs, ratio = ("", "") if peer is None else (f"{peer:.1f}", f"{peer / ours:.1f}x")
    return row.name, target, f"{ours:.1f} ({p90:.1f})", met, theirs, ratio, f"{row.slowdown(best_us):.2f}"
