"""The prefix cache as the scheduler sees it: who owns which page, before and after each call.

Joins three owners that do not know each other: the tree (which prefix is where, decides), the allocators (what is free, behind the
`PoolKeeper`, which executes `CacheAction`s) and the page table (which page a running request uses for which positions). No tensors.

A model has full attention, and may have sliding windows and recurrent states beside it. `window` and `states` are what a request does with
those; without them (None) nothing here costs or does more than for full attention alone.

The row of a request, in positions:

    0            cache_protected_len      kv_committed_len      kv_allocated_len
    |  the tree's, under kv.lock  |  the request's own: content valid  |  own: not yet valid  |
    |<------- borrowed ---------->|<------------------- private, rounded up to pages -------->|

`cache_unfinished_req` and `cache_finished_req` move the first border to the right, by giving private pages to the tree, or by taking the tree's
pages for the same tokens instead and freeing the private ones. `release` gives the private range back, once.

Within one step nothing here waits for the executor: pages freed now may be written by a later plan, and plans run in order.
Does not choose whom to admit or retract. Source: SGLang `unified_radix_cache`; cache.md section 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rootlet.cache import invariants
from rootlet.cache import key as keys
from rootlet.cache.components.full import FullComponent
from rootlet.cache.components.mamba import MambaComponent
from rootlet.cache.components.swa import SWAComponent
from rootlet.cache.dump import pretty
from rootlet.cache.events import AllBlocksCleared, EventRecorder
from rootlet.cache.eviction import POLICIES
from rootlet.cache.host_keeper import HostKeeper
from rootlet.cache.host_tier import HostLock, HostTier
from rootlet.cache.keeper import PoolKeeper, by_reason
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.publish import Publisher
from rootlet.cache.request_states import RequestStates
from rootlet.cache.request_window import RequestWindow
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import EvictReason, MatchResult, PageArray, RadixKey, ReqKvInfo, TreeLock
from rootlet.memory.page_allocator import PageAllocator
from rootlet.memory.req_to_token import ReqToTokenPool
from rootlet.memory.state_allocator import StateAllocator
from rootlet.memory.swa_allocator import SWAAllocator


class UnifiedRadixCache:
    """With `enabled=False` the same object holds nothing: a match is empty, an insert does nothing, release is the same."""

    def __init__(
        self,
        *,
        page_size: int,
        allocator: PageAllocator,
        req_to_token: ReqToTokenPool,
        policy: str = "lru",
        enabled: bool = True,
        window: SWAAllocator | None = None,
        states: StateAllocator | None = None,
        recorder: EventRecorder | None = None,
        tier: HostTier | None = None,
    ) -> None:
        """`window`, `states`: pools of the components that the model has beside full attention. `recorder` is told every block that comes or goes.
        `tier`: where prefixes go that leave the device; `host` is the way to it, None without one.

        Raises: BadConfig for an unknown `policy`.
        """
        self.page_size = page_size
        self.enabled = enabled
        self.allocator = allocator
        self.req_to_token = req_to_token
        self.full = FullComponent(POLICIES.get(policy), num_total_pages=allocator.num_pages)
        swa = None if window is None else SWAComponent(window_len=window.window_len, page_size=page_size, num_total_pages=window.pages.num_pages)
        mamba = None if states is None else MambaComponent()
        others = [part for part in (swa, mamba) if part is not None]
        self.core = UnifiedTreeCore(page_size=page_size, full=self.full, others=others, announce=recorder is not None)
        self.keeper = PoolKeeper(self.core, {self.full.name: allocator}, recorder=recorder)
        self.window: RequestWindow | None = None
        self.states: RequestStates | None = None
        if window is not None and swa is not None:
            self.keeper.add_pool(swa.name, window.pages)
            self.window = RequestWindow(swa, window, core=self.core, keeper=self.keeper, sharing=enabled)
        if states is not None and mamba is not None:
            self.keeper.add_pool(mamba.name, states.pool)
            self.states = RequestStates(mamba, states, core=self.core, keeper=self.keeper)
        self.host = None if tier is None else HostKeeper(tier, core=self.core, keeper=self.keeper)
        self._publisher = Publisher(self.core, self.keeper, rows=req_to_token, window=self.window, states=self.states, host=self.host)
        self._counters = dict.fromkeys(("matches", "lookup_tokens", "matched_tokens"), 0)
        self._hits = [0] * (1 + len(others))  # of each component, Full first
        self._host_hits = 0

    # ---- sizes, in pages, O(1) ---------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Grows at each flush; locks and nodes of an earlier epoch are void."""
        return self.core.epoch

    @property
    def free_pages(self) -> int:
        return self.allocator.num_free

    @property
    def evictable_pages(self) -> int:
        return self.full.evictable

    @property
    def protected_pages(self) -> int:
        return self.full.protected

    @property
    def available_pages(self) -> int:
        """What `alloc_pages` can give now."""
        return self.free_pages + self.evictable_pages

    # ---- match and lock ----------------------------------------------------------------------------------------------------------------

    def probe(self, key: RadixKey) -> int:
        """Tokens of the longest cached prefix of `key`, whole pages. Read-only: no split, no recency. One memcmp an edge."""
        return self.core.match_len(key)[0]

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix, for admission: ends a node (splitting one if need be) and counts as a use.

        `pages` is the caller's copy. The pages stay the tree's: lock `last_device_node` before anything that may evict.
        """
        reached = self.core.match(key)
        node, best = reached.node, reached.best
        self._counters["matches"] += 1
        self._counters["lookup_tokens"] += len(key)
        self._counters["matched_tokens"] += node.end
        for i, length in enumerate(reached.hit_lens):
            self._hits[i] += length
        found = MatchResult(device_prefix_len=node.end, last_device_node=node, pages=self.core.path_pages(node))
        if self.host is not None:
            self._host_hits += best.end - node.end
            found = replace(found, host_hit_length=best.end - node.end, best_match_node=best)
        if not self.core.others:
            return found
        return _with_others(found, reached.full_len, self.window, grid=self.page_size if self.states is None else self.states.allocator.grid)

    def inc_lock_ref(self, node: UnifiedTreeNode) -> TreeLock:
        """Keep the path to `node`, and what else a request that goes on from there reads, until `dec_lock_ref` of the receipt, which the caller
        owns."""
        return self.core.lock(node)

    def dec_lock_ref(self, lock: TreeLock) -> None:
        """Raises: AssertionError L1 for a receipt that was released before or is of another epoch."""
        self.core.unlock(lock)

    # ---- pages -------------------------------------------------------------------------------------------------------------------------

    def ensure_pages(self, n: int, *, reason: EvictReason = EvictReason.REQUESTED) -> bool:
        """Evict just as many KV pages as are missing for `n` free ones. False when that cannot be, and then nothing was evicted."""
        return self.keeper.ensure(self.full.name, n, reason)

    def alloc_pages(self, n: int, *, reason: EvictReason = EvictReason.ADMISSION) -> PageArray | None:
        """`n` KV pages, int32, which the caller writes to the row of a request; None, and nothing evicted, when there are not so many."""
        return self.keeper.alloc(self.full.name, n, reason)

    def grow(self, kv: ReqKvInfo, length: int, *, reason: EvictReason = EvictReason.GROWTH) -> bool:
        """Pages of every kind for positions [0, length), written to the row: all, or none and False. `kv` owns them."""
        assert kv.row is not None, f"R5: {kv} holds no row"
        have, need = keys.num_pages(kv.kv_allocated_len, self.page_size), keys.num_pages(length, self.page_size)
        missing = 0 if self.window is None else self.window.pages_for(kv, length)
        if missing and self.window is not None and missing > self.keeper.available(self.window.component.name):
            return False
        if have < need:
            pages = self.alloc_pages(need - have, reason=reason)  # leaves first: they take their window pages along
            if pages is None:
                return False
            self.req_to_token.write(kv.row, have, pages)
        if missing and self.window is not None:
            grown = self.window.grow(kv, length, reason)
            assert grown, "E4: window pages were to be had just now"
        kv.kv_allocated_len = max(kv.kv_allocated_len, length)
        return True

    # ---- the life of a request ---------------------------------------------------------------------------------------------------------

    def cache_unfinished_req(self, kv: ReqKvInfo, key: RadixKey, *, priority: int = 0) -> None:
        """Share what the request has computed so far and let it go on: at a chunk's end, or when its prompt is done.

        `key` = its tokens whose KV is committed. Afterwards the tree owns the page floor of the key, [0, cache_protected_len), under kv.lock; the
        unaligned tail stays private. Calling it again with the same key changes nothing.
        """
        if self.enabled:
            self._publisher.publish(kv, key, priority=priority, final=False)

    def cache_finished_req(self, kv: ReqKvInfo, key: RadixKey, *, prompt_len: int | None = None, priority: int = 0) -> None:
        """Share what the request owns, then take everything else back: `kv` holds nothing afterwards.

        `key` = prompt + outputs through the stop and not beyond. With `prompt_len` a node ends at the prompt's page floor, so that outputs can be
        evicted and leave the prompt. Raises: AssertionError R5 when `kv` holds nothing.
        """
        assert kv.row is not None, f"R5: {kv} holds no KV"
        if self.enabled:
            if prompt_len is not None and not self.core.others:  # windows and states end where they end
                prompt = RadixKey(key.namespace, key.data, min(prompt_len, len(key)))
                self._publisher.publish(kv, prompt, priority=priority, final=False)
            self._publisher.publish(kv, key, priority=priority, final=True)
        self.release(kv)

    def release(self, kv: ReqKvInfo) -> None:
        """Abort, retract, preempt: free the private pages and the row, unlock; share nothing new. `kv` holds nothing afterwards.

        Raises: AssertionError R5 when `kv` holds nothing.
        """
        self._publisher.release(kv)

    def flush(self) -> bool:
        """Forget every prefix. Only while no lock, row, private page or slot is out; else False, and nothing changes."""
        pools = self.keeper.pools
        if self.host is not None and not self.host.is_idle:
            return False
        if self.core.num_locks or self.req_to_token.num_held or any(self.keeper.available(name) < pool.num_pages for name, pool in pools.items()):
            return False
        recorder, self.keeper.recorder = self.keeper.recorder, None  # one event for all, not one a node
        self.ensure_pages(self.allocator.num_pages, reason=EvictReason.FLUSH)
        if self.host is not None:
            self.host.drop_all()
        self.keeper.recorder = recorder
        if recorder is not None:
            recorder.record(AllBlocksCleared())
        for pool in pools.values():
            pool.clear()
        self.req_to_token.clear()
        self.core.epoch += 1
        return True

    # ---- views -------------------------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sizes now (pages, nodes, locks) and counters since the start (tokens, pages). `matched_tokens` counts each `match_prefix` call, hence a
        re-admitted request twice; per-request hits are the scheduler's to report. `hit_tokens`: by tier, "all" = of matches, by component = what
        it would have matched alone with full attention. `evictions`: units given up, by tier, component and reason."""
        total = self.allocator.num_pages
        hits = dict(zip((self.full.name, *(part.name for part in self.core.others)), self._hits, strict=True))
        evictions = {"device": self.keeper.evictions} | ({} if self.host is None else {"host": self.host.evictions})
        return {
            "total_pages": total,
            "free_pages": self.free_pages,
            "evictable_pages": self.evictable_pages,
            "protected_pages": self.protected_pages,
            "private_pages": self.keeper.private[self.full.name],
            "usage": 1.0 - self.available_pages / total if total else 0.0,
            "nodes": self.core.num_nodes,
            "namespaces": len(self.core.roots),
            "locks": self.core.num_locks,
            "rows": self.req_to_token.num_held,
            "epoch": self.epoch,
            **self._counters,
            "adopted_pages": self._publisher.adopted_pages,
            "duplicate_pages": self._publisher.duplicate_pages,
            "hit_tokens": {"device": {"all": self._counters["matched_tokens"], **hits}}
            | ({} if self.host is None else {"host": {"all": self._host_hits}}),
            "evictions": {tier: by_reason(counts) for tier, counts in evictions.items()},
            "evicted_pages": self.keeper.evicted(self.full.name),
            **self.keeper.stats_of_others(),
            **({} if self.host is None else self.host.stats()),
        }

    def pretty(self, max_nodes: int = 200) -> str:
        """The tree as ASCII lines, the first `max_nodes` nodes of it."""
        return pretty(self.core, max_nodes=max_nodes)

    def check(self, live: Iterable[ReqKvInfo], *, locks: Iterable[TreeLock] = (), host_locks: Iterable[HostLock] = ()) -> None:
        """Assert every invariant of cache.md 1.3 that applies. `live`: all requests that hold a row; `locks`: all others' locks, those of copies
        in flight aside; `host_locks`: likewise. O(pool).

        Raises: AssertionError whose message starts with the invariant's id.
        """
        invariants.check(self, live=list(live), locks=list(locks), host_locks=list(host_locks))


def _with_others(found: MatchResult, reach: int, window: RequestWindow | None, *, grid: int) -> MatchResult:
    """What a match says beyond full attention; `reach`: tokens that the full KV alone would match, `grid`: where a match can end at all."""
    branch_at = keys.floor_len(reach, grid)
    return replace(
        found,
        window_pages=None if window is None else window.component.window_pages(found.last_device_node),
        branch_at=branch_at if branch_at > found.device_prefix_len else None,
    )
