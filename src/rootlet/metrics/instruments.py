"""The instruments of one server: a registry of its own (never the global one), and the one wrapper through which every request is measured.

Owns counters and histograms of what the HTTP process sees; the engine's own numbers come as a snapshot at scrape time (`prometheus.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rootlet.core.clock import Clock
from rootlet.core.errors import RootletError
from rootlet.core.types import Finish
from rootlet.metrics import names
from rootlet.metrics.names import Metric


class Stats(Protocol):
    """The part of a request's times that is measured (the scheduler's `ReqStats`). Seconds, tokens."""

    @property
    def queue_s(self) -> float: ...
    @property
    def num_retractions(self) -> int: ...
    @property
    def cached_host_len(self) -> int: ...
    @property
    def cached_storage_len(self) -> int: ...


class Chunk(Protocol):
    """The part of a generation event that is measured (the frontend's `GenerateChunk`)."""

    @property
    def index(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def completion_len(self) -> int: ...
    @property
    def cached_len(self) -> int: ...
    @property
    def finish(self) -> Finish | None: ...
    @property
    def stats(self) -> Stats | None: ...


C = TypeVar("C", bound=Chunk)


@dataclass(slots=True)
class _Progress:
    """Of one choice: when its last token came and how many it had."""

    first_s: float | None = None
    last_s: float = 0.0
    len: int = 0


@dataclass(slots=True)
class _Request:
    """`parent` = the latest event of choice 0, which computed the prompt for all."""

    start_s: float
    choices: dict[int, _Progress] = field(default_factory=dict)
    parent: Chunk | None = None
    num_finished: int = 0


class Instruments:
    """All instruments of one server. Not thread-safe by design: one event loop writes."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._counters = {m.name: Counter(m.name, m.help, m.labels, registry=self._registry) for m in _of("counter")}
        self._gauges = {m.name: Gauge(m.name, m.help, m.labels, registry=self._registry) for m in _of("gauge")}
        self._histograms = {m.name: Histogram(m.name, m.help, m.labels, registry=self._registry, buckets=m.buckets) for m in _of("histogram")}
        self._itl = self._histograms[names.ITL.name]
        self._in_flight = self._gauges[names.IN_FLIGHT.name]
        self.num_in_flight = 0
        self._gaps: list[float] = []
        self._num_generated = 0

    @property
    def registry(self) -> CollectorRegistry:
        """With everything noted so far: what comes with each token is kept aside until somebody asks, or a request ends."""
        self._settle()
        return self._registry

    def _settle(self) -> None:
        gaps, self._gaps = self._gaps, []
        for gap_s in gaps:
            self._itl.observe(gap_s)
        if self._num_generated:
            self.count(names.GENERATED_TOKENS, self._num_generated)
            self._num_generated = 0

    def count(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        counter = self._counters[metric.name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def time(self, metric: Metric, value: float, **labels: str) -> None:
        histogram = self._histograms[metric.name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    async def observe(self, chunks: AsyncGenerator[C, None], clock: Clock) -> AsyncGenerator[C, None]:
        """Passes `chunks` on unchanged and measures them. Owns `chunks`: closing this closes them."""
        request = _Request(clock.now())
        self._enter(1)
        is_over = False
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._on_chunk(request, chunk, clock.now())
                    yield chunk
            is_over = True
        except RootletError:
            is_over = True
            self.count(names.REQUESTS, outcome="refused")
            raise
        finally:
            self._enter(-1)
            self._settle()
            if request.parent is not None:
                self._count_prompt(request.parent)
            unfinished = max(1, len(request.choices)) - request.num_finished
            if not is_over and unfinished > 0:  # closed or cancelled: what has not finished was given up by the client
                self.count(names.REQUESTS, unfinished, outcome="abort")

    def _enter(self, step: int) -> None:
        self.num_in_flight += step
        self._in_flight.set(self.num_in_flight)

    def _on_chunk(self, request: _Request, chunk: Chunk, now_s: float) -> None:
        choice = request.choices.get(chunk.index)
        if choice is None:
            choice = request.choices[chunk.index] = _Progress()
        num_new = chunk.completion_len - choice.len
        if num_new > 0:
            if choice.first_s is None:
                choice.first_s = now_s
                self.time(names.TTFT, now_s - request.start_s)
            else:
                self._gaps += [(now_s - choice.last_s) / num_new] * num_new
            choice.last_s, choice.len = now_s, chunk.completion_len
            self._num_generated += num_new
        if chunk.index == 0:
            request.parent = chunk
        if chunk.finish is not None:
            request.num_finished += 1
            self._on_finish(request, choice, chunk, now_s)

    def _count_prompt(self, chunk: Chunk) -> None:
        """Once a request, from the last event of choice 0: it knows the tiers of the hit."""
        self.count(names.PROMPT_TOKENS, chunk.prompt_len)
        self.time(names.PROMPT_LEN, chunk.prompt_len)
        stats = chunk.stats
        host, storage = (stats.cached_host_len, stats.cached_storage_len) if stats else (0, 0)
        for tier, cached_len in (("device", chunk.cached_len - host - storage), ("host", host), ("storage", storage)):
            if cached_len > 0:
                self.count(names.CACHED_TOKENS, cached_len, tier=tier)

    def _on_finish(self, request: _Request, choice: _Progress, chunk: Chunk, now_s: float) -> None:
        assert chunk.finish is not None
        self.count(names.REQUESTS, outcome=str(chunk.finish.kind))
        self.time(names.E2E, now_s - request.start_s)
        self.time(names.COMPLETION_LEN, chunk.completion_len)
        if choice.first_s is not None and choice.len > 1:
            self.time(names.TPOT, (choice.last_s - choice.first_s) / (choice.len - 1))
        if chunk.stats is not None:
            self.time(names.QUEUE, chunk.stats.queue_s)
            self.count(names.RETRACTIONS, chunk.stats.num_retractions)


def _of(kind: str) -> list[Metric]:
    return [m for m in names.REQUEST_METRICS if m.kind == kind]
