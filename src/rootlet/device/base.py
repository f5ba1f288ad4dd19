"""What a device gives the runner: a `Graph`. Owns no state; the devices are beside this file.

A graph is one recorded step: captured once over static buffers at the largest size, replayed for every step with the row counts of that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OpTime:
    """Where one op's time went over `calls` profiled replays: `seconds` in the op on the calling thread, `wait_s` at the barrier after it."""

    name: str
    calls: int
    seconds: float
    wait_s: float


class Graph(Protocol):
    def capture(self) -> AbstractContextManager[None]:
        """Ops called inside are recorded instead of run. Once a graph. Tensors that they return are overwritten by each replay."""
        ...

    def replay(self, *, num_tokens: int, num_logit_rows: int) -> None:
        """Runs the recorded ops with these row counts. Raises `ValueError` when a count is above the captured size."""
        ...

    def free(self) -> None:
        """Gives the recording and its memory back; the graph cannot be replayed afterwards."""
        ...

    def profile(self, *, on: bool) -> None:
        """Starts (from zero) or stops timing each op; costs nothing while off."""
        ...

    def times(self) -> Sequence[OpTime]:
        """One entry for each recorded op, in order of recording, since profiling was last started."""
        ...
