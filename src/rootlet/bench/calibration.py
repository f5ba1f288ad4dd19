"""A yardstick for a machine that drifts: a fixed amount of native work, timed around every measurement. Ratios, not absolutes, are quoted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np


def calibrate(seconds: float = 0.15) -> float:
    """Passes a second of a fixed float32 matrix product that fits in cache, on one thread's worth of BLAS; larger is a faster machine now."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((192, 192), dtype=np.float32)
    passes, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        a = a @ a
        a /= np.abs(a).max()
        passes += 1
    return passes / (time.perf_counter() - start)


def interleave(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every side once a round, A B A B, with a calibration around each; results are kept raw. The calibration's spread is returned
    under "calibration", so a reader sees how much the machine drifted."""
    results: dict[str, list[float]] = {name: [] for name in (*sides, "calibration")}
    for _ in range(rounds):
        for name, side in sides.items():
            results["calibration"].append(calibrate())
            results[name].append(side())
    return results


def median_ratio(mine: list[float], theirs: list[float]) -> float:
    return statistics.median(mine) / statistics.median(theirs)
