"""Counts of what the scheduler did, for metrics and for people. Plain numbers that only grow; the metrics room gives them names and formats."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Any

SECONDS_EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """`counts[i]` observations <= `edges[i]` and above the edge before; the last count is beyond all edges."""

    edges: tuple[float, ...] = SECONDS_EDGES
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_EDGES) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def dump(self) -> dict[str, Any]:
        return {"edges": list(self.edges), "counts": list(self.counts), "sum": self.total, "count": sum(self.counts)}


@dataclass(slots=True)
class Counters:
    """Tokens and requests since the start. `cached_tokens` counts first admissions only: recomputation after a retraction is not a hit."""

    requests: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    duplicate_rids: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    retractions: int = 0
    preemptions: int = 0
    discarded_rows: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    forward_s: float = 0.0
    queue_s: Histogram = field(default_factory=Histogram)
    ttft_s: Histogram = field(default_factory=Histogram)
    tpot_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)

    def numbers(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not isinstance(getattr(self, f.name), Histogram)}

    def histograms(self) -> dict[str, dict[str, Any]]:
        return {f.name: getattr(self, f.name).dump() for f in fields(self) if isinstance(getattr(self, f.name), Histogram)}
