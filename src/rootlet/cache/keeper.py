"""Between the tree, which decides, and the allocators, which know what is free: executes `CacheAction`s and makes room, component by component.

The only place that gives pages or slots of the tree back. Does not know rows or requests. Eviction asks for exactly what is missing in one pool,
and looks at the pool after every victim, since one victim may free units of several components.
"""

from __future__ import annotations

from collections.abc import Iterable

from rootlet.cache.actions import CacheAction, FreePages
from rootlet.cache.components.base import TreeComponent
from rootlet.cache.components.full import FullComponent
from rootlet.cache.events import EventRecorder
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.core.step import IntArray
from rootlet.memory.page_allocator import PageAllocator


class PoolKeeper:
    """`pools`: component name -> its allocator; "full" is one of them. `evicted` counts units that were taken to make room. `recorder`: who
    hears what comes and goes."""

    __slots__ = ("_core", "_others", "evicted", "pools", "recorder")

    def __init__(self, core: UnifiedTreeCore, pools: dict[str, PageAllocator], *, recorder: EventRecorder | None) -> None:
        self._core = core
        self._others = {component.name: component for component in core.others}
        self.pools = pools
        self.recorder = recorder
        self.evicted = dict.fromkeys(pools, 0)

    def add_pool(self, name: str, pool: PageAllocator) -> None:
        """The allocator of one more component of the tree."""
        self.pools[name] = pool
        self.evicted[name] = 0

    def available(self, name: str) -> int:
        """Units that `alloc` can give now."""
        return self.pools[name].num_free + self._counts(name).evictable

    def ensure(self, name: str, n: int) -> bool:
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
                    self.evicted[action.component] += len(action.pages)
            self.execute(actions)
        return True

    def alloc(self, name: str, n: int) -> IntArray | None:
        """`n` units, which the caller owns from now on; None, and nothing evicted, when there are not so many."""
        return self.pools[name].alloc(n) if self.ensure(name, n) else None

    def execute(self, actions: Iterable[CacheAction]) -> None:
        """Do what the tree decided, in order."""
        for action in actions:
            if isinstance(action, FreePages):
                self.pools[action.component].free(action.pages)
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
                ("evicted", self.evicted[name]),
            )
        }
