"""The prefix cache as the scheduler sees it: who owns which page, before and after each call.

Joins three owners that do not know each other: the tree (which prefix is where, decides), the page allocator (which pages are free) and the
page table (which page a running request uses for which positions). This is the only place that executes `CacheAction`s. No tensors.

The row of a request, in positions:

    0            cache_protected_len      kv_committed_len      kv_allocated_len
    |  the tree's, under kv.lock  |  the request's own: content valid  |  own: not yet valid  |
    |<------- borrowed ---------->|<------------------- private, rounded up to pages -------->|

`cache_unfinished_req` and `cache_finished_req` move the first border to the right, by giving private pages to the tree, or by taking the tree's
pages for the same tokens instead and freeing the private ones. `release` gives the private range back, once. The order inside a call is
insert, re-point, free duplicates, lock new, unlock old: nothing allocates in between, so no page that is still named can be handed out.

Within one step nothing here waits for the executor: pages freed now may be written by a later plan, and plans run in order.
Does not choose whom to admit or retract. Source: SGLang `unified_radix_cache`; cache.md section 2.
"""

from __future__ import annotations

from collections.abc import Iterable

from rootlet.cache import invariants
from rootlet.cache import key as keys
from rootlet.cache.actions import CacheAction
from rootlet.cache.components.full import FullComponent
from rootlet.cache.dump import pretty
from rootlet.cache.eviction import POLICIES
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import MatchResult, PageArray, RadixKey, ReqKvInfo, TreeLock
from rootlet.memory.page_allocator import PageAllocator
from rootlet.memory.req_to_token import ReqToTokenPool


class UnifiedRadixCache:
    """With `enabled=False` the same object holds nothing: a match is empty, an insert does nothing, release is the same."""

    def __init__(self, *, page_size: int, allocator: PageAllocator, req_to_token: ReqToTokenPool, policy: str = "lru", enabled: bool = True) -> None:
        """Raises: BadConfig for an unknown `policy`."""
        self.page_size = page_size
        self.enabled = enabled
        self.allocator = allocator
        self.req_to_token = req_to_token
        self.full = FullComponent(POLICIES.get(policy), num_total_pages=allocator.num_pages)
        self.core = UnifiedTreeCore(page_size=page_size, components=(self.full,))
        self._counters = dict.fromkeys(("matches", "lookup_tokens", "matched_tokens", "adopted_pages", "duplicate_pages", "evicted_pages"), 0)

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
        return self.core.match_len(key)

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix, for admission: ends a node (splitting one if need be) and counts as a use.

        `pages` is the caller's copy. The pages stay the tree's: lock `last_device_node` before anything that may evict.
        """
        node = self.core.match(key)
        self._counters["matches"] += 1
        self._counters["lookup_tokens"] += len(key)
        self._counters["matched_tokens"] += node.end
        return MatchResult(device_prefix_len=node.end, last_device_node=node, pages=self.core.path_pages(node))

    def inc_lock_ref(self, node: UnifiedTreeNode) -> TreeLock:
        """Keep the path to `node` until `dec_lock_ref` of the receipt, which the caller owns."""
        self.core.lock(node)
        return TreeLock(node=node, epoch=self.epoch)

    def dec_lock_ref(self, lock: TreeLock) -> None:
        """Raises: AssertionError L1 for a receipt that was released before or is of another epoch."""
        assert not lock.released, f"L1: {lock} is released twice"
        assert lock.epoch == self.epoch, f"L1: {lock} is of an earlier epoch than {self.epoch}"
        lock.released = True
        self.core.unlock(lock.node)

    # ---- pages -------------------------------------------------------------------------------------------------------------------------

    def ensure_pages(self, n: int) -> bool:
        """Evict just as many pages as are missing for `n` free ones. False when that cannot be, and then nothing was evicted."""
        if n > self.available_pages:
            return False
        while (shortfall := n - self.free_pages) > 0:
            actions = self.core.evict_one(self.full, max_pages=shortfall)
            assert actions, f"E4: {shortfall} pages short, {self.evictable_pages} said to be evictable, no candidate"
            self._counters["evicted_pages"] += _execute(actions, self.allocator)
        return True

    def alloc_pages(self, n: int) -> PageArray | None:
        """`n` pages, int32, which the caller owns from now on; None, and nothing evicted, when there are not so many."""
        return self.allocator.alloc(n) if self.ensure_pages(n) else None

    # ---- the life of a request ---------------------------------------------------------------------------------------------------------

    def cache_unfinished_req(self, kv: ReqKvInfo, key: RadixKey, *, priority: int = 0) -> None:
        """Share what the request has computed so far and let it go on: at a chunk's end, or when its prompt is done.

        `key` = its tokens whose KV is committed. Afterwards the tree owns the page floor of the key, [0, cache_protected_len), under kv.lock; the
        unaligned tail stays private. Calling it again with the same key changes nothing.
        """
        self._publish(kv, key, priority=priority)

    def cache_finished_req(self, kv: ReqKvInfo, key: RadixKey, *, prompt_len: int | None = None, priority: int = 0) -> None:
        """Share what the request owns, then take everything else back: `kv` holds nothing afterwards.

        `key` = prompt + outputs through the stop and not beyond. With `prompt_len` a node ends at the prompt's page floor, so that outputs can be
        evicted and leave the prompt. Raises: AssertionError R5 when `kv` holds nothing.
        """
        if prompt_len is not None:
            prompt = RadixKey(key.namespace, key.data, min(prompt_len, len(key)))
            self._publish(kv, prompt, priority=priority)
        self._publish(kv, key, priority=priority)
        self.release(kv)

    def release(self, kv: ReqKvInfo) -> None:
        """Abort, retract, preempt: free the private pages and the row, unlock; share nothing new. `kv` holds nothing afterwards.

        Raises: AssertionError R5 when `kv` holds nothing.
        """
        assert kv.row is not None, f"R5: second release of {kv}"
        kv.check(self.page_size)
        private = self.req_to_token.pages(kv.row, kv.cache_protected_len // self.page_size, keys.num_pages(kv.kv_allocated_len, self.page_size))
        self.allocator.free(private)
        if kv.lock is not None:
            self.dec_lock_ref(kv.lock)
        self.req_to_token.free_row(kv.row)
        kv.row = kv.lock = kv.last_node = None
        kv.cache_protected_len = kv.cache_inserted_len = kv.kv_committed_len = kv.kv_allocated_len = 0

    def flush(self) -> bool:
        """Forget every prefix. Only while no lock, row or private page is out; else False, and nothing changes."""
        idle = self.core.num_locks == 0 and self.req_to_token.num_held == 0 and self.available_pages == self.allocator.num_pages
        if not idle:
            return False
        self.ensure_pages(self.allocator.num_pages)
        self.allocator.clear()
        self.req_to_token.clear()
        self.core.epoch += 1
        return True

    # ---- views -------------------------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Sizes now (pages, nodes, locks) and counters since the start (tokens, pages). `matched_tokens` counts each `match_prefix` call, hence a
        re-admitted request twice; per-request hits are the scheduler's to report."""
        total = self.allocator.num_pages
        return {
            "total_pages": total,
            "free_pages": self.free_pages,
            "evictable_pages": self.evictable_pages,
            "protected_pages": self.protected_pages,
            "private_pages": total - self.available_pages - self.protected_pages,
            "usage": 1.0 - self.available_pages / total if total else 0.0,
            "nodes": self.core.num_nodes,
            "namespaces": len(self.core.roots),
            "locks": self.core.num_locks,
            "rows": self.req_to_token.num_held,
            "epoch": self.epoch,
            **self._counters,
        }

    def pretty(self, max_nodes: int = 200) -> str:
        """The tree as ASCII lines, the first `max_nodes` nodes of it."""
        return pretty(self.core, max_nodes=max_nodes)

    def check(self, live: Iterable[ReqKvInfo], *, locks: Iterable[TreeLock] = ()) -> None:
        """Assert every invariant of cache.md 1.3 that applies. `live`: all requests that hold a row; `locks`: all others' locks. O(pool).

        Raises: AssertionError whose message starts with the invariant's id.
        """
        invariants.check(self.core, self.full, allocator=self.allocator, rows=self.req_to_token, live=list(live), locks=list(locks))

    # ---- inside ------------------------------------------------------------------------------------------------------------------------

    def _publish(self, kv: ReqKvInfo, key: RadixKey, *, priority: int) -> None:
        assert kv.row is not None, f"R5: {kv} holds no KV"
        aligned = keys.floor_len(len(key), self.page_size)
        assert aligned <= kv.kv_committed_len, f"R1: a key of {len(key)} tokens, of which {kv.kv_committed_len} are committed"
        if not self.enabled or aligned == 0:
            return
        anchor = self.core.root if kv.lock is None else kv.lock.node
        assert anchor.end == kv.cache_protected_len, f"L4: {kv} is protected by a lock that ends at {anchor.end}"
        own = self.req_to_token.pages(kv.row, 0, aligned // self.page_size)
        result = self.core.insert(key, own, protected=anchor, inserted_len=kv.cache_inserted_len, priority=priority)
        if len(result.borrowed):
            self.req_to_token.write(kv.row, anchor.end // self.page_size, result.borrowed)
        self._counters["duplicate_pages"] += _execute(result.actions, self.allocator)
        self._counters["adopted_pages"] += (aligned - result.present_len) // self.page_size
        kv.cache_inserted_len = max(kv.cache_inserted_len, aligned)
        if aligned > anchor.end:
            lock = self.inc_lock_ref(result.node)
            if kv.lock is not None:
                self.dec_lock_ref(kv.lock)
            kv.lock, kv.last_node, kv.cache_protected_len = lock, result.node, aligned


def _execute(actions: tuple[CacheAction, ...], allocator: PageAllocator) -> int:
    """Do what the tree decided; returns the pages that became free."""
    for action in actions:
        allocator.free(action.pages)
    return sum(len(action.pages) for action in actions)
