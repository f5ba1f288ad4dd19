"""Runs a scheduler again from its record and compares every plan: the same code must decide the same, line by line (I11).

The world is the record: messages turn by turn, results instead of an executor, readings instead of a clock. The replay stops at the first plan
that differs, since what was recorded after it belongs to another history.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity, ControlOp, StepPlan, StepResult
from rootlet.scheduler import loop
from rootlet.scheduler.control import plan_line
from rootlet.scheduler.record import Head, Line, Plan, Result, Turn
from rootlet.scheduler.scheduler import Scheduler, Sinks


@dataclass(slots=True)
class Outcome:
    """`plans`, `turns` and `messages` replayed; `differing`: (number of the plan, recorded, replayed) of the first difference, [] = none.
    `cut`: the file ends within a line, so what came after is unknown."""

    plans: int = 0
    turns: int = 0
    messages: int = 0
    differing: list[tuple[int, str, str]] = field(default_factory=list)
    cut: bool = False


class _RecordEnds(Exception):
    """The record breaks off here, or the histories parted."""


class _Script:
    """The record as the three doors of a scheduler, and where the comparison stands."""

    def __init__(self, lines: list[Line], head: Head) -> None:
        self.outcome = Outcome()
        self._capacity = head.capacity
        self._turns = deque(line for line in lines if isinstance(line, Turn))
        self._plans = deque(line for line in lines if isinstance(line, Plan))
        self._results = deque(line.result for line in lines if isinstance(line, Result))
        self._stretches = deque(deque(line.clock) for line in lines if isinstance(line, Turn | Plan))
        self._now_s = 0.0

    def now(self) -> float:
        if self._stretches and self._stretches[0]:
            self._now_s = self._stretches[0].popleft()
        return self._now_s

    def _next_stretch(self) -> None:
        """The line that ends a stretch of readings is reached: code that reads the clock more or less often than it did falls in step here."""
        if self._stretches:
            self._stretches.popleft()

    def receive(self, _timeout_s: float) -> list[Any]:
        if self._plans and self._plans[0].n <= self.outcome.turns:
            self._part(self._plans[0], "no plan")
        if not self._turns:
            raise _RecordEnds
        turn = self._turns.popleft()
        self._next_stretch()
        self.outcome.turns = turn.n
        self.outcome.messages += len(turn.messages)
        return list(turn.messages)

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        if not self._plans and not self._turns:
            raise _RecordEnds  # the record broke off before this line
        turn, line = self.outcome.turns, plan_line(plan)
        recorded = self._plans.popleft() if self._plans else Plan(turn, "no plan")
        if (recorded.n, recorded.line) != (turn, line):
            self._part(recorded, f"turn {turn}: {line}")
        self.outcome.plans += 1
        self._next_stretch()

    def _part(self, recorded: Plan, mine: str) -> None:
        self.outcome.differing.append((self.outcome.plans, f"turn {recorded.n}: {recorded.line}", mine))
        raise _RecordEnds

    def collect(self) -> StepResult:
        if not self._results:
            raise _RecordEnds
        return self._results.popleft()

    def control(self, op: ControlOp) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


def read(path: Path) -> list[Line]:
    """All lines; one that breaks off at the end of the file is left out. Raises `BadConfig` for what is no record."""
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    try:
        texts = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    for number, text in enumerate(texts[:-1], 1):
        try:
            lines.append(decoder.decode(text))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadConfig(f"{path}:{number} is not a line of a record made by this version with --record: {error}") from None
    if not lines or not isinstance(lines[0], Head):
        raise BadConfig(f"{path} is not a record: its first line must be the head that --record writes")
    return lines


def replay(path: Path) -> Outcome:
    """Runs the whole record. Raises `BadConfig` for a file that is none."""
    lines = read(path)
    head = lines[0]
    assert isinstance(head, Head)
    script = _Script(lines, head)
    script.outcome.cut = not path.read_bytes().endswith(b"\n")
    scheduler = Scheduler(
        executor=script,
        scheduler_args=replace(head.scheduler, record=None),
        cache_args=head.cache,
        eos_token_ids=head.eos_token_ids,
        clock=script,
        sinks=Sinks(lambda batch: None, lambda message: None, (lambda entry: None) if head.logs else None),
        retract_every=head.retract_every,
    )
    try:
        loop.run(scheduler, script.receive, head.depth)
    except _RecordEnds:
        return script.outcome
    return script.outcome
