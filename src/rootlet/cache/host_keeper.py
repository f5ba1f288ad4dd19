"""Between the tree, the host pools and the tier: starts copies, takes their acknowledgements, makes room on the host.

What the scheduler and the tier see of the host side, as `UnifiedRadixCache.host`; None without a tier. Runs on the scheduler's thread only.
When a copy cannot be started (no room, too short, one is under way) that is a normal outcome: the prefix is computed anew, or never kept.
"""

from __future__ import annotations

from collections import Counter

from rootlet.cache.actions import BackUp, LoadBack
from rootlet.cache.host_copies import HostCopies, InFlight
from rootlet.cache.host_tier import HostLock, HostTier
from rootlet.cache.host_tree import HostTree
from rootlet.cache.keeper import PoolKeeper
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.paths import on_device, path_from
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import EvictReason, MatchResult, PageArray, TreeLock


class HostKeeper:
    """`evictions`: host units given up, by (component, reason). Counters are in pages of the full KV."""

    __slots__ = (
        "_copies", "_core", "_keeper", "_ops", "_tier", "backed_up_pages", "evictions", "failed_copies", "flying", "loaded_pages", "skipped", "tree",
    )  # fmt: skip

    def __init__(self, tier: HostTier, *, core: UnifiedTreeCore, keeper: PoolKeeper) -> None:
        assert set(tier.pools) == set(keeper.pools), f"C6: host pools {sorted(tier.pools)} for components {sorted(keeper.pools)}"
        self._tier = tier
        self._core = core
        self._keeper = keeper
        keeper.host_pools = dict(tier.pools)
        self.tree = core.host = HostTree(core)
        self._copies = HostCopies(core, self.tree)
        self._ops = 0
        self.flying: dict[int, InFlight] = {}
        self.evictions: Counter[tuple[str, EvictReason]] = Counter()
        self.skipped: Counter[str] = Counter()
        self.backed_up_pages = self.loaded_pages = self.failed_copies = 0

    @property
    def is_idle(self) -> bool:
        """No copy is in flight and no host value is locked."""
        return not self.flying and not self.tree.num_locks

    # ---- locks --------------------------------------------------------------------------------------------------------------------------

    def lock(self, node: UnifiedTreeNode) -> HostLock:
        """Keep the host copy of the path to `node`, and all host values of `node`, until `unlock` of the receipt, which the caller owns."""
        assert node.host is not None, f"L1: host lock on {node}, which has no host copy"
        return self.tree.lock(node, node.start)

    def unlock(self, lock: HostLock) -> None:
        """Raises: AssertionError L1 for a receipt that was released before or is of another epoch."""
        self.tree.unlock(lock)

    def locks(self) -> tuple[list[TreeLock], list[HostLock]]:
        """Those of copies in flight, on the device and on the host."""
        return [copy.device_lock for copy in self.flying.values()], [copy.host_lock for copy in self.flying.values()]

    # ---- copies -------------------------------------------------------------------------------------------------------------------------

    def write_through(self, node: UnifiedTreeNode) -> None:
        """The path to `node` was used once more: start to back up what was used often enough, parents first, until one finds no room.

        The device values stay under a lock until the acknowledgement."""
        for at in path_from(node, 0):
            if not 0 < self._tier.write_through_hits <= at.hits:
                return
            if at.backup_op is None and self._copies.missing(at) and not self._back_up(at):
                self.skipped["no_host_room"] += 1
                return

    def _back_up(self, node: UnifiedTreeNode) -> bool:
        assert node.parent is not None, f"S1: backup of the root {node}"
        missing, lock = self._copies.missing(node), self.tree.lock(node.parent, node.parent.start)
        if not all(self.ensure(name, len(units)) for name, units in missing.items()):
            self.tree.unlock(lock)
            return False
        self._ops += 1
        host = {name: self._take(name, len(units)) for name, units in missing.items()}
        copy = self.flying[self._ops] = self._copies.begin_backup(self._ops, node, host, lock)
        self._tier.start(BackUp(self._ops, {name: span.copy() for name, span in copy.spans.items()}))
        return True

    def load_back(self, found: MatchResult) -> int | None:
        """Start to bring what `found.best_match_node` needs to the device, evicting for room; the copy's number, also of one that was under way for
        a part of it: match again when that is acknowledged. None: nothing to load, too short, or no room; compute the prefix anew.

        The caller has locked `found.last_device_node`.
        """
        best = found.best_match_node
        if best is None or not best.alive or found.host_hit_length < max(1, self._tier.min_load_len):
            return None
        wanted = self._copies.wanted(best)
        if not wanted:
            return None
        start = min(node.start for nodes in wanted.values() for node in nodes)
        pending = self._copies.pending_load(best, start)
        if pending is not None:
            return pending
        locks = self._core.lock(on_device(best) if on_device(best).end else self._core.root), self.tree.lock(best, start)
        sizes = {name: sum(len(node.host[name]) for node in nodes if node.host is not None) for name, nodes in wanted.items()}
        if not all(self._keeper.ensure(name, size, EvictReason.LOAD_BACK) for name, size in sizes.items()):
            self._core.unlock(locks[0])
            self.tree.unlock(locks[1])
            self.skipped["no_device_room"] += 1
            return None
        self._ops += 1
        device = {name: self._keeper.reserve(name, size) for name, size in sizes.items()}
        copy = self.flying[self._ops] = self._copies.begin_load(self._ops, best, wanted, device, locks=locks)
        self._tier.start(LoadBack(self._ops, {name: span.copy() for name, span in copy.spans.items()}))
        return self._ops

    def acknowledge(self, op: int, *, ok: bool) -> None:
        """Copy `op` ended. Its units belong to the nodes from now on, or are free again.

        Raises: AssertionError C6 for a copy that is not in flight.
        """
        copy = self.flying.pop(op, None)
        assert copy is not None, f"C6: copy {op} is not in flight"
        full = self._core.full.name
        before = self._core.full.evictable + self._core.full.protected, self.tree.held[full]
        if copy.is_load:
            for name, span in copy.spans.items():
                self._keeper.in_flight[name] -= int((span.device != 0).sum())
            actions = self._copies.commit_load(copy, ok=ok)
            self.loaded_pages += self._core.full.evictable + self._core.full.protected - before[0]
        else:
            actions = self._copies.commit_backup(copy, ok=ok)
            self.backed_up_pages += self.tree.held[full] - before[1]
        self.failed_copies += not ok
        self._keeper.execute(actions)

    # ---- room ---------------------------------------------------------------------------------------------------------------------------

    def ensure(self, name: str, n: int, reason: EvictReason = EvictReason.HOST_PRESSURE) -> bool:
        """Give up host values until `n` units of the pool are free; False when there are not so many, though some may have gone."""
        pool, is_full = self._tier.pools[name], name == self._core.full.name
        while (shortfall := n - pool.num_free) > 0:
            actions = [] if n > pool.num_pages else self.tree.evict_leaf(max_pages=shortfall) if is_full else self.tree.evict_value(name)
            if not actions:
                return False
            self._keeper.execute(actions, host_evictions=(self.evictions, reason))
        return True

    def drop_all(self) -> None:
        """Every host value goes. Only while `is_idle` and with nothing on the device."""
        self.ensure(self._core.full.name, self._tier.pools[self._core.full.name].num_pages, EvictReason.FLUSH)
        for pool in self._tier.pools.values():
            assert pool.num_free == pool.num_pages, f"C6: {pool.num_pages - pool.num_free} host units are left after a flush"
            pool.clear()

    def in_flight(self, name: str) -> int:
        """Host units that backups in flight go to."""
        return sum(len(copy.spans[name].host) for copy in self.flying.values() if not copy.is_load and name in copy.spans)

    def stats(self) -> dict[str, int]:
        """Sizes now, in units of each component, and counters since the start."""
        sizes = {
            f"host_{name}_{field}": value
            for name, pool in self._tier.pools.items()
            for field, value in (("total", pool.num_pages), ("free", pool.num_free), ("held", self.tree.held[name]))
        }
        skipped = {f"copies_skipped_{reason}": count for reason, count in self.skipped.items()}
        counts = {"backed_up_pages": self.backed_up_pages, "loaded_back_pages": self.loaded_pages, "demoted_pages": self.tree.demoted_pages}
        return {**sizes, **counts, "copies_in_flight": len(self.flying), "copies_failed": self.failed_copies, **skipped}

    def _take(self, name: str, n: int) -> PageArray:
        units = self._tier.pools[name].alloc(n)
        assert units is not None, f"C6: {n} host units of {name} were free just now"
        return units
