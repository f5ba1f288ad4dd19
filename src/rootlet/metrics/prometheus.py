"""The text of `/metrics`: the server's own instruments plus a snapshot of the engine's state, which is read afresh at each scrape.

The snapshot is the scheduler's answer to "metrics": numbers in groups. Known keys become the documented metrics; every other number is exported
as `rootlet_scheduler_state{key=...}`, so a new counter is visible before anyone names it.
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
MAX_KEYS = 200

Named = tuple[names.Metric, tuple[str, ...]]
# The scheduler's snapshot, key by key (scheduler/control.py, `metrics`): which metric a number is, with its labels.
_KNOWN: dict[str, Named] = {
    "gauges.running": (names.RUNNING, ()),
    "gauges.waiting": (names.WAITING, ()),
    "gauges.kv_free_pages": (names.KV_PAGES, ("free",)),
    "gauges.kv_evictable_pages": (names.KV_PAGES, ("cached",)),
    "gauges.kv_protected_pages": (names.KV_PAGES, ("locked",)),
    "gauges.kv_private_pages": (names.KV_PAGES, ("private",)),
    "gauges.kv_leaked_pages": (names.KV_PAGES, ("leaked",)),
    "gauges.kv_total_pages": (names.KV_PAGES, ("total",)),
    "counters.retractions": (names.SCHEDULER_RETRACTIONS, ()),
    "counters.preemptions": (names.SCHEDULER_PREEMPTIONS, ()),
    "cache.lookup_tokens": (names.LOOKUP_TOKENS, ()),
    "cache.evicted_pages": (names.EVICTED_PAGES, ()),
    "cache.backed_up_pages": (names.HOST_PAGES, ("backed_up",)),
    "cache.loaded_back_pages": (names.HOST_PAGES, ("loaded_back",)),
    "cache.demoted_pages": (names.HOST_PAGES, ("demoted",)),
    "cache.copies_in_flight": (names.HOST_COPIES, ()),
    "cache.copies_failed": (names.HOST_COPIES_LOST, ("failed",)),
    "cache.copies_skipped_no_host_room": (names.HOST_COPIES_LOST, ("no_host_room",)),
    "cache.copies_skipped_no_device_room": (names.HOST_COPIES_LOST, ("no_device_room",)),
    "kv_events.published_batches": (names.KV_EVENT_BATCHES, ()),
    "kv_events.dropped_batches": (names.KV_EVENT_DROPS, ()),
}
# What a tier keeps of a component: cache.swa_free on the device, cache.host_swa_free on the host.
_KNOWN |= {
    f"cache.{prefix}{component}_{state}": (names.CACHE_UNITS, (tier, component, state))
    for tier, prefix, components, states in (
        ("device", "", ("swa", "mamba"), ("total", "free", "evictable", "protected", "private")),
        ("host", "host_", ("full", "swa", "mamba"), ("total", "free", "held")),
    )
    for component in components
    for state in states
}
# Groups whose further keys are the labels, one a level.
_LABELLED = {"queue": names.QUEUE_BY_REASON, "cache.hit_tokens": names.HIT_TOKENS, "cache.evictions": names.EVICTIONS}


def flatten(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested dictionaries as (dotted key, value); lists, strings and booleans are left out."""
    for key, value in state.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _named(key: str) -> Named | None:
    """What the number under `key` is called; None when it has no name of its own."""
    for group, metric in _LABELLED.items():
        labels = tuple(key.removeprefix(f"{group}.").split("."))
        if key.startswith(f"{group}.") and len(labels) == len(metric.labels):
            return metric, labels
    return _KNOWN.get(key)


class Snapshot(Collector):
    """One scrape's view of the engine."""

    def __init__(self, state: Mapping[str, Any], *, is_up: bool) -> None:
        self._state = state
        self._is_up = is_up

    def collect(self) -> Iterator[Metric]:
        """The documented metrics first, then every other number by its key."""
        found: dict[Named, float] = {(names.ENGINE_UP, ()): float(self._is_up)}
        rest: list[tuple[str, float]] = []
        for key, value in flatten(self._state):
            name = _named(key)
            if name is None:
                rest.append((key, value))
            else:
                found[name] = value
        found |= {(names.SCHEDULER_STATE, (key,)): value for key, value in rest[:MAX_KEYS]}
        for metric in names.ENGINE_METRICS:
            family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(metric.name, metric.help, labels=metric.labels)
            for (its, labels), value in found.items():
                if its is metric:
                    family.add_metric(labels, value)
            yield family


def render(registry: CollectorRegistry, state: Mapping[str, Any], *, is_up: bool) -> bytes:
    """The exposition text. `state` may be empty: then only the server's own numbers are there."""
    snapshot = CollectorRegistry(auto_describe=False)
    snapshot.register(Snapshot(state, is_up=is_up))
    return generate_latest(registry) + generate_latest(snapshot)
