"""Writes down everything that a scheduler is told and everything that it decides, a JSON object a line, for `rootlet replay`.

What it is told comes through three doors, and each is wrapped: the messages of a turn, the results of steps, and every reading of the clock. What
it decides is its plans, written as their lines. So the scheduler itself knows nothing of this, and a replay sees the very same world.
Each line is flushed when it is written, results with the line that follows; a file that breaks off is a record up to there.
The file holds prompts (as token ids) and grows with the traffic.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import msgspec

from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import Clock
from rootlet.core.errors import BadConfig
from rootlet.core.log import logger
from rootlet.core.step import Capacity, ControlOp, Executor, RowResult, StepPlan, StepResult
from rootlet.core.types import TokenLogprob
from rootlet.ipc.messages import ToScheduler
from rootlet.scheduler import loop
from rootlet.scheduler.control import plan_line
from rootlet.scheduler.scheduler import Scheduler

_log = logger("scheduler")


class Head(msgspec.Struct, frozen=True, tag="head"):
    """First line: all that a scheduler is built from; `logs` = it writes request lines, which read the clock. `clock` of any line: readings since
    the line before."""

    version: str
    depth: int
    capacity: Capacity
    scheduler: SchedulerArgs
    cache: CacheArgs
    eos_token_ids: tuple[int, ...]
    logs: bool = False
    retract_every: int = 0


class Turn(msgspec.Struct, frozen=True, tag="turn"):
    """A turn of the loop begins: number `n`, with these messages."""

    n: int
    messages: tuple[ToScheduler, ...] = ()
    clock: tuple[float, ...] = ()


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """A plan was launched in turn `n`."""

    n: int
    line: str
    clock: tuple[float, ...] = ()


class Result(msgspec.Struct, frozen=True, tag="result"):
    """The oldest plan in flight gave this. Of logprobs only the number is kept: nothing is decided by their values."""

    result: StepResult


Line = Head | Turn | Plan | Result


class Recorder:
    """One file, one scheduler. Raises `BadConfig` when the file cannot be written at the start. A disk that is full later ends the record, with
    a word in the log, and not the server: the file is then a record up to there."""

    def __init__(self, path: Path, head: Head) -> None:
        self._encoder = msgspec.json.Encoder()
        self._readings: list[float] = []
        self._turn = 0
        self._file: TextIO | None = None
        try:
            self._file = path.open("w", encoding="utf-8")
            self._write(self._file, head, flush=True)
        except OSError as error:
            self._drop()
            raise BadConfig(f"--record {path}: {error.strerror}") from None

    def note(self, now_s: float) -> None:
        """A reading of the clock."""
        if self._file is not None:
            self._readings.append(now_s)

    def write(self, line: Line, *, flush: bool) -> None:
        if self._file is None:
            return
        try:
            self._write(self._file, line, flush=flush)
        except OSError as error:
            self._end(error)

    def _write(self, file: TextIO, line: Line, *, flush: bool) -> None:
        file.write(self._encoder.encode(line).decode() + "\n")
        if flush:
            file.flush()

    def _end(self, error: OSError) -> None:
        _log.error("record_ended", reason=error.strerror, turn=self._turn)
        self._drop()

    def _drop(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what it holds cannot be written either
                self._file.close()
        self._file = None
        self._readings.clear()

    def begin_turn(self, messages: list[Any]) -> None:
        """Messages have come: the next turn is about to handle them."""
        self._turn += 1
        self.write(Turn(self._turn, tuple(messages), self._take_readings()), flush=True)

    def _take_readings(self) -> tuple[float, ...]:
        readings = tuple(self._readings)
        self._readings.clear()
        return readings

    def launched(self, plan: StepPlan) -> None:
        self.write(Plan(self._turn, plan_line(plan), self._take_readings()), flush=True)

    def close(self) -> None:
        """The last readings, so that a replay ends where the record did."""
        self.begin_turn([])
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:
            self._end(error)


class RecordingClock:
    def __init__(self, clock: Clock, recorder: Recorder) -> None:
        self._clock = clock
        self._recorder = recorder

    def now(self) -> float:
        now_s = self._clock.now()
        self._recorder.note(now_s)
        return now_s


class RecordingExecutor:
    """`Executor` that notes what goes in and what comes out of another."""

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        self._executor = executor
        self.recorder = recorder

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    def submit(self, plan: StepPlan) -> None:
        self.recorder.launched(plan)
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        self.recorder.write(Result(_slim(result)), flush=False)
        return result

    def control(self, op: ControlOp) -> dict[str, Any]:
        return self._executor.control(op)

    def close(self) -> None:
        self._executor.close()


def _slim(result: StepResult) -> StepResult:
    def bare(entries: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(entry.token_id, None) for entry in entries)

    rows = tuple(RowResult(row.tokens, bare(row.logprobs), bare(row.prompt_logprobs), row.error) for row in result.rows)
    return StepResult(result.step, rows, result.forward_s)


def run(scheduler: Scheduler, receive: loop.Receive, depth: int) -> None:
    """`loop.run`, noting the messages of each turn when the scheduler is recorded; the record ends with it, however it ends."""
    executor = scheduler.executor
    if not isinstance(executor, RecordingExecutor):
        loop.run(scheduler, receive, depth)
        return
    recorder = executor.recorder

    def noted(timeout_s: float) -> list[Any]:
        messages = receive(timeout_s)
        recorder.begin_turn(messages)
        return messages

    try:
        loop.run(scheduler, noted, depth)
    finally:
        recorder.close()


def head_of(
    executor: Executor, scheduler: SchedulerArgs, cache: CacheArgs, *, eos_token_ids: tuple[int, ...], logs: bool, retract_every: int = 0
) -> Head:
    return Head(version("rootlet"), int(scheduler.depth), executor.capacity, scheduler, cache, tuple(eos_token_ids), logs, retract_every)
