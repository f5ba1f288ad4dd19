"""The step in which a request's pages become the tree's: insert, re-point, free duplicates, lock new, unlock old. And its reverse, the release.

Nothing allocates between insert and unlock, so no page that is still named can be handed out. Called by `UnifiedRadixCache` only; owns nothing.
"""

from __future__ import annotations

from rootlet.cache import key as keys
from rootlet.cache.host_keeper import HostKeeper
from rootlet.cache.keeper import PoolKeeper
from rootlet.cache.request_states import RequestStates
from rootlet.cache.request_window import RequestWindow
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import RadixKey, ReqKvInfo
from rootlet.memory.req_to_token import ReqToTokenPool


class Publisher:
    """`adopted_pages`, `duplicate_pages`: KV pages that the tree took over, and that it had already. `host`: who may want a copy, if somebody."""

    __slots__ = ("_core", "_host", "_keeper", "_rows", "_states", "_window", "adopted_pages", "duplicate_pages")

    def __init__(
        self,
        core: UnifiedTreeCore,
        keeper: PoolKeeper,
        *,
        rows: ReqToTokenPool,
        window: RequestWindow | None,
        states: RequestStates | None,
        host: HostKeeper | None = None,
    ) -> None:
        self._core = core
        self._host = host
        self._keeper = keeper
        self._rows = rows
        self._window = window
        self._states = states
        self.adopted_pages = 0
        self.duplicate_pages = 0

    def publish(self, kv: ReqKvInfo, key: RadixKey, *, priority: int, final: bool) -> None:
        """Share the page floor of `key`; with states, up to where there is one. `final`: the request ends with this."""
        assert kv.row is not None, f"R5: {kv} holds no KV"
        size, anchor = self._core.page_size, self._core.root if kv.lock is None else kv.lock.node
        aligned = keys.floor_len(len(key), size)
        assert aligned <= kv.kv_committed_len, f"R1: a key of {len(key)} tokens, of which {kv.kv_committed_len} are committed"
        if aligned == 0:
            return
        assert anchor.end == kv.cache_protected_len, f"L4: {kv} is protected by a lock that ends at {anchor.end}"
        if self._window is not None:
            self._window.slide(kv, len(key))
        if self._states is not None:
            aligned = self._states.shareable_len(kv, aligned, final=final)
            if aligned <= anchor.end:
                return
            key = RadixKey(key.namespace, key.data, aligned)
        own = self._rows.pages(kv.row, 0, aligned // size)
        result = self._core.insert(key, own, protected=anchor, inserted_len=kv.cache_inserted_len, priority=priority)
        actions = result.actions
        if self._window is not None:
            actions += self._window.commit(kv, result.node)
        if self._states is not None:
            actions += self._states.commit(kv, result.node)
        if len(result.borrowed):
            self._rows.write(kv.row, anchor.end // size, result.borrowed)
            self.duplicate_pages += len(result.borrowed)
        self._keeper.execute(actions)
        self.adopted_pages += (aligned - result.present_len) // size
        kv.cache_inserted_len = max(kv.cache_inserted_len, aligned)
        if aligned > anchor.end:
            lock = self._core.lock(result.node)
            if kv.lock is not None:
                self._core.unlock(kv.lock)
            self._keeper.private[self._core.full.name] -= (aligned - anchor.end) // size
            kv.lock, kv.cache_protected_len = lock, aligned
        if self._host is not None:
            self._host.write_through(result.node)

    def release(self, kv: ReqKvInfo) -> None:
        """Free all that is the request's own, unlock; `kv` holds nothing afterwards."""
        assert kv.row is not None, f"R5: second release of {kv}"
        size = self._core.page_size
        kv.check(size)
        private = self._rows.pages(kv.row, kv.cache_protected_len // size, keys.num_pages(kv.kv_allocated_len, size))
        self._keeper.give_back(self._core.full.name, private)
        if self._window is not None:
            self._window.close(kv)
        if self._states is not None:
            self._states.close(kv)
        if kv.lock is not None:
            self._core.unlock(kv.lock)
        self._rows.free_row(kv.row)
        kv.row = kv.lock = None
        kv.cache_protected_len = kv.cache_inserted_len = kv.kv_committed_len = kv.kv_allocated_len = 0
