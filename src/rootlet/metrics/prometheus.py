"""The text of `/metrics`: the server's own instruments plus a snapshot of the engine's state, which is read afresh at each scrape.

The snapshot is the scheduler's answer to "metrics": a dictionary of numbers, flat or in groups. Known keys become the documented metrics; every
other number is exported as `rootlet_scheduler_state{key=...}`, so a new counter is visible before anyone names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from rootlet.metrics import names

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ALIASES = {
    "num_running": "running", "num_running_reqs": "running", "running_requests": "running", "running": "running",
    "num_waiting": "waiting", "num_queue_reqs": "waiting", "waiting_requests": "waiting", "waiting": "waiting", "num_waiting_reqs": "waiting",
    "num_retractions": "retractions", "retractions": "retractions", "num_retracted": "retractions",
    "pages_free": "free", "free_pages": "free", "num_free_pages": "free", "num_pages_free": "free",
    "pages_cached": "cached", "cached_pages": "cached", "evictable_pages": "cached", "num_cached_pages": "cached", "pages_evictable": "cached",
    "num_evictable_pages": "cached",
    "pages_locked": "locked", "locked_pages": "locked", "pages_used": "locked", "used_pages": "locked", "num_locked_pages": "locked",
    "num_used_pages": "locked",
    "pages_total": "total", "total_pages": "total", "num_pages": "total", "num_total_pages": "total",
}  # fmt: skip
_PAGE_GROUPS = ("pages", "kv_pages")
_PAGE_STATES = {"free": "free", "cached": "cached", "evictable": "cached", "locked": "locked", "used": "locked", "total": "total"}
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
    group, _, leaf = key.rpartition(".")
    if group.rpartition(".")[2] in _PAGE_GROUPS:
        return _PAGE_STATES.get(leaf)
    return _ALIASES.get(leaf)


class Snapshot(Collector):
    """One scrape's view of the engine."""

    def __init__(self, state: Mapping[str, Any], *, is_up: bool) -> None:
        self._state = state
        self._is_up = is_up

    def collect(self) -> Iterator[Metric]:
        known: dict[str, float] = {}
        rest: list[tuple[str, float]] = []
        for key, value in flatten(self._state):
            meaning = _meaning(key)
            if meaning is None:
                rest.append((key, value))
            else:
                known.setdefault(meaning, value)
        yield GaugeMetricFamily(names.ENGINE_UP.name, names.ENGINE_UP.help, value=float(self._is_up))
        for metric, meaning in ((names.RUNNING, "running"), (names.WAITING, "waiting")):
            if meaning in known:
                yield GaugeMetricFamily(metric.name, metric.help, value=known[meaning])
        if "retractions" in known:
            metric = names.SCHEDULER_RETRACTIONS
            yield CounterMetricFamily(metric.name, metric.help, value=known["retractions"])
        pages = GaugeMetricFamily(names.KV_PAGES.name, names.KV_PAGES.help, labels=["state"])
        for page_state in ("free", "cached", "locked", "total"):
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
