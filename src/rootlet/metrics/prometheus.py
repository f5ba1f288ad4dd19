"""The text of `/metrics`: the server's own instruments plus a snapshot of the engine's state, which is read afresh at each scrape.

The snapshot is the scheduler's answer to "metrics": a dictionary of numbers, flat or in groups. Known keys become the documented metrics; every
other number is exported as `rootlet_scheduler_state{key=...}`, so a new counter is visible before anyone names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from rootlet.metrics import names

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ALIASES = {
    "running": "running", "num_running": "running", "waiting": "waiting", "num_waiting": "waiting", "retractions": "retractions",
    "num_retractions": "retractions", "preemptions": "preemptions", "evicted_pages": "evicted_pages",
}  # fmt: skip
_PAGE_STATES = {
    "free": "free",
    "cached": "cached",
    "evictable": "cached",
    "locked": "locked",
    "protected": "locked",
    "private": "private",
    "total": "total",
}
_PAGES = re.compile(r"(?:kv_)?(\w+?)_pages|(?:kv_)?pages\.(\w+)")
_COUNTERS = (
    (names.SCHEDULER_RETRACTIONS, "retractions"),
    (names.SCHEDULER_PREEMPTIONS, "preemptions"),
    (names.EVICTED_PAGES, "evicted_pages"),
)
_QUEUE = "queue."
MAX_KEYS = 200


def flatten(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested dictionaries as (dotted key, value); lists, strings and booleans are left out."""
    for key, value in state.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _meaning(key: str) -> str | None:
    """The documented meaning of a snapshot's key: `kv_free_pages`, `pages.free`, `gauges.running` ..., wherever it stands."""
    pages = _PAGES.fullmatch(key) or _PAGES.fullmatch(key.partition(".")[2])
    if pages and (pages[1] or pages[2]) in _PAGE_STATES:
        return _PAGE_STATES[pages[1] or pages[2]]
    return _ALIASES.get(key.rpartition(".")[2])


class Snapshot(Collector):
    """One scrape's view of the engine."""

    def __init__(self, state: Mapping[str, Any], *, is_up: bool) -> None:
        self._state = state
        self._is_up = is_up

    def collect(self) -> Iterator[Metric]:
        """The documented metrics first, then every other number by its key."""
        known: dict[str, float] = {}
        rest: list[tuple[str, float]] = []
        reasons: list[tuple[str, float]] = []
        for key, value in flatten(self._state):
            meaning = _meaning(key)
            if key.startswith(_QUEUE):
                reasons.append((key.removeprefix(_QUEUE), value))
            elif meaning is None:
                rest.append((key, value))
            else:
                known.setdefault(meaning, value)
        yield GaugeMetricFamily(names.ENGINE_UP.name, names.ENGINE_UP.help, value=float(self._is_up))
        for metric, meaning in ((names.RUNNING, "running"), (names.WAITING, "waiting")):
            if meaning in known:
                yield GaugeMetricFamily(metric.name, metric.help, value=known[meaning])
        for metric, meaning in _COUNTERS:
            if meaning in known:
                yield CounterMetricFamily(metric.name, metric.help, value=known[meaning])
        queued = GaugeMetricFamily(names.QUEUE_BY_REASON.name, names.QUEUE_BY_REASON.help, labels=["reason"])
        for reason, count in reasons:
            queued.add_metric([reason], count)
        yield queued
        pages = GaugeMetricFamily(names.KV_PAGES.name, names.KV_PAGES.help, labels=["state"])
        for page_state in ("free", "cached", "locked", "private", "total"):
            if page_state in known:
                pages.add_metric([page_state], known[page_state])
        yield pages
        others = GaugeMetricFamily(names.SCHEDULER_STATE.name, names.SCHEDULER_STATE.help, labels=["key"])
        for key, value in rest[:MAX_KEYS]:
            others.add_metric([key], value)
        yield others


def render(registry: CollectorRegistry, state: Mapping[str, Any], *, is_up: bool) -> bytes:
    """The exposition text. `state` may be empty: then only the server's own numbers are there."""
    snapshot = CollectorRegistry(auto_describe=False)
    snapshot.register(Snapshot(state, is_up=is_up))
    return generate_latest(registry) + generate_latest(snapshot)
