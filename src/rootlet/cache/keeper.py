"""Between the tree, which decides, and the allocators, which know what is free: executes `CacheAction`s and makes room, component by component.

The only place that gives pages or slots of the tree back. Does not know rows or requests. Eviction asks for exactly what is missing in one pool,
and looks at the pool after every victim, since one victim may free units of several components.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rootlet.cache.actions import CacheAction, FreeHostPages, FreePages
from rootlet.cache.components.base import TreeComponent
from rootlet.cache.components.full import FullComponent
from rootlet.cache.events import EventRecorder
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import EvictReason
from rootlet.core.step import IntArray
from rootlet.memory.ledger import Ledger
from rootlet.memory.page_allocator import PageAllocator


class PoolKeeper:
    """`pools`: component name -> its allocator; "full" is one of them. `evictions` counts units of the device that were taken to make room, by
    (component, reason). `private`: units in the hands of requests, counted where they are handed out and where they come back, and by nobody's
    remainder, so that a lost one shows. `in_flight`: units that a copy from the host goes to. `host_pools`: as `pools`, of the host tier, if there is
    one. `recorder`: who hears what comes and goes."""

    __slots__ = ("_core", "_others", "evictions", "host_pools", "in_flight", "pools", "private", "recorder")

    def __init__(self, core: UnifiedTreeCore, pools: dict[str, PageAllocator], *, recorder: EventRecorder | None) -> None:
        self._core = core
        self._others = {component.name: component for component in core.others}
        self.pools = pools
        self.recorder = recorder
        self.host_pools: dict[str, PageAllocator] = {}
        self.in_flight: Counter[str] = Counter()
        self.evictions: Counter[tuple[str, EvictReason]] = Counter()
        self.private = dict.fromkeys(pools, 0)

    def add_pool(self, name: str, pool: PageAllocator) -> None:
        """The allocator of one more component of the tree."""
        self.pools[name] = pool
        self.private[name] = 0

    def available(self, name: str) -> int:
        """Units that `alloc` can give now."""
        return self.pools[name].num_free + self._counts(name).evictable

    def evicted(self, name: str) -> int:
        """Units of one component that were taken to make room, for whatever reason."""
        return sum(count for (component, _), count in self.evictions.items() if component == name)

    def ensure(self, name: str, n: int, reason: EvictReason = EvictReason.REQUESTED) -> bool:
        """Evict until `n` units of the pool are free. False when that cannot be, and then nothing was evicted."""
        if n > self.available(name):
            return False
        pool = self.pools[name]
        while (shortfall := n - pool.num_free) > 0:
            component = self._others.get(name)
            actions = self._core.evict_leaf(max_pages=shortfall) if component is None else self._core.evict_value(component)
            assert actions, f"E4: {shortfall} units of {name} short, said to be evictable, and no candidate"
            for action in actions:
                if isinstance(action, FreePages):
                    self.evictions[action.component, reason] += len(action.pages)
            self.execute(actions)
        return True

    def alloc(self, name: str, n: int, reason: EvictReason) -> IntArray | None:
        """`n` units, which a request owns from now on; None, and nothing evicted, when there are not so many."""
        return self.take(name, n) if self.ensure(name, n, reason) else None

    def take(self, name: str, n: int) -> IntArray:
        """`n` units that are free, for a request."""
        units = self.pools[name].alloc(n)
        assert units is not None, f"E4: {n} units of {name} were free just now"
        self.private[name] += n
        return units

    def reserve(self, name: str, n: int) -> IntArray:
        """`n` units for a copy from the host, which `ensure` has made free."""
        units = self.pools[name].alloc(n)
        assert units is not None, f"E4: {n} units of {name} were free just now"
        self.in_flight[name] += n
        return units

    def give_back(self, name: str, units: IntArray) -> None:
        """A request's own units are free again."""
        self.pools[name].free(units)
        self.private[name] -= len(units)

    def ledger(self, name: str) -> Ledger:
        """Units of one pool by owner, each from its own count."""
        pool, counts = self.pools[name], self._counts(name)
        return Ledger(pool.num_free, counts.evictable, counts.protected, self.private[name], pool.num_pages, self.in_flight[name])

    def execute(self, actions: Iterable[CacheAction], *, host_evictions: tuple[Counter[tuple[str, EvictReason]], EvictReason] | None = None) -> None:
        """Do what the tree decided, in order. `host_evictions`: where host units that are freed are counted, and under which reason."""
        for action in actions:
            if isinstance(action, FreePages):
                self.pools[action.component].free(action.pages)
            elif isinstance(action, FreeHostPages):
                self.host_pools[action.component].free(action.pages)
                if host_evictions is not None:
                    host_evictions[0][action.component, host_evictions[1]] += len(action.pages)
            elif self.recorder is not None:
                self.recorder.record(action.event)

    def _counts(self, name: str) -> FullComponent | TreeComponent:
        return self._others.get(name) or self._core.full

    def stats_of_others(self) -> dict[str, int]:
        """Sizes and evictions of the components beside Full, by name."""
        return {
            f"{name}_{field}": value
            for name, component in self._others.items()
            for field, value in (
                ("total", self.pools[name].num_pages),
                ("free", self.pools[name].num_free),
                ("evictable", component.evictable),
                ("protected", component.protected),
                ("private", self.private[name]),
                ("evicted", self.evicted(name)),
            )
        }


def by_reason(evictions: Counter[tuple[str, EvictReason]]) -> dict[str, dict[str, int]]:
    """Component -> reason -> units."""
    out: dict[str, dict[str, int]] = {}
    for (component, reason), count in sorted(evictions.items()):
        out.setdefault(component, {})[reason.value] = count
    return out
