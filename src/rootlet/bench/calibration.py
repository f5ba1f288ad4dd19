"""What the machine can do right now: the limits that results are held against, measured around every one of them, and a lock so that two benchmarks
never disturb each other. Virtual CPUs drift by factors within seconds: only ratios of one run are quoted.
"""

from __future__ import annotations

import contextlib
import fcntl
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROUNDS = 400_000
READ_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """On the whole kernel team: int8 multiply-adds a second in registers, and bytes a second read from memory."""

    macs_per_s: float
    bytes_per_s: float


class Calibration:
    """Takes about 30 ms each time on a quiet machine. Needs the native kernels; the team is the process's."""

    def __init__(self) -> None:
        from rootlet.kernels.cpu import _native

        self._native = _native
        self._buffer = np.ones(READ_BYTES // 4, np.float32)
        self.taken: list[Limits] = []

    def take(self) -> Limits:
        start = time.perf_counter()
        macs = self._native.calibrate_multiply(ROUNDS)
        middle = time.perf_counter()
        read = self._native.calibrate_read(self._buffer.ctypes.data, self._buffer.size)
        limits = Limits(macs / (middle - start), read / (time.perf_counter() - middle))
        self.taken.append(limits)
        return limits

    def best(self) -> Limits:
        """The machine undisturbed, as far as this run saw it: the upper quartile."""
        return Limits(_upper([x.macs_per_s for x in self.taken]), _upper([x.bytes_per_s for x in self.taken]))

    def spread(self) -> float:
        """Slowest over fastest multiply rate of this run: 1 = a constant machine."""
        rates = [x.macs_per_s for x in self.taken]
        return min(rates) / max(rates)


def _upper(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[2] if len(values) > 1 else values[0]


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Waits until no other benchmark of ours runs on this machine."""
    with (Path(tempfile.gettempdir()) / "rootlet-bench.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
