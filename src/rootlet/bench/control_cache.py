"""Operations of the prefix cache to measure, ours and the baseline's. Pages of 16 tokens, random tokens, one thread, no torch.

What takes the baseline a millisecond or more is in CPU time of the thread, so that other work on the machine does not flatter us.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from rootlet.bench.pace import Measure, Operation, times_us
from rootlet.bench.radix_baseline import BaselineRadixCache, BaselineReq
from rootlet.cache.key import pack
from rootlet.cache.registry import build_cache
from rootlet.cache.types import RadixKey, ReqKvInfo
from rootlet.cache.unified_radix_cache import UnifiedRadixCache
from rootlet.config.schema import CacheArgs
from rootlet.core.step import Capacity
from rootlet.core.types import Namespace

PAGE = 16
PLAIN = Namespace()
KINDS = {
    "full": {},
    "full+swa": {"window_len": 1024, "num_window_pages": 120_000},
    "full+mamba": {"num_states": 60_000, "state_grid": PAGE},
    "full+swa+mamba": {"window_len": 1024, "num_window_pages": 120_000, "num_states": 60_000, "state_grid": PAGE},
}
EDGES = (9_984, 40_000, 65_536)  # what three requests of one prefix leave
CALLS, LEAVES = 400, 50_000
INSERT_LEN, INSERTS, EVICTIONS, BASELINE_EVICTIONS = 4_096, 60, 200, 5

Tokens = npt.NDArray[np.int64]
Work = Callable[[], object]


def operations(kind: str = "full") -> Iterator[Operation]:
    """Beside the baseline for full attention, alone for the other kinds."""
    rng = np.random.default_rng(0)
    long = rng.integers(0, 50_000, size=EDGES[-1])
    cache = _cache(kind, num_pages=120_000)
    for length in EDGES:
        serve(cache, long[:length])
    short, whole = RadixKey(PLAIN, pack(long[:INSERT_LEN])), RadixKey(PLAIN, pack(long))
    node = cache.match_prefix(whole).last_device_node
    yield Operation("probe 4k tokens", 10, lambda: times_us(lambda: cache.probe(short), CALLS))
    baseline, ids = _baseline_with(long), long.tolist()
    four_k, last = ids[:INSERT_LEN], baseline.match_prefix(ids)[1]

    def baseline_locks() -> None:
        baseline.inc_lock_ref(last)
        baseline.dec_lock_ref(last)

    plain = kind == "full"
    yield _operation(plain, "match 4k tokens", 10, lambda: cache.match_prefix(short), lambda: baseline.match_prefix(four_k))
    yield _operation(plain, "match 64k tokens", 50, lambda: cache.match_prefix(whole), lambda: baseline.match_prefix(ids), peer_is_slow=True)
    yield _operation(plain, "lock + unlock", 4, lambda: cache.dec_lock_ref(cache.inc_lock_ref(node)), baseline_locks)
    yield Operation("insert 4k tokens (new)", 20, lambda: _insert_us(kind, rng), (lambda: _baseline_insert_us(rng)) if plain else None)
    yield Operation(f"evict a page, {LEAVES // 1000}k leaves", 10, _evictions(kind), _baseline_evictions() if plain else None)


def _operation(plain: bool, name: str, target_us: float, ours: Work, theirs: Work, *, peer_is_slow: bool = False) -> Operation:
    calls, clock = (20, time.thread_time) if peer_is_slow else (100, time.perf_counter)
    return Operation(name, target_us, lambda: times_us(ours, CALLS), (lambda: times_us(theirs, calls, clock=clock)) if plain else None)


# ---- ours ------------------------------------------------------------------------------------------------------------------------------------


def _cache(kind: str, *, num_pages: int) -> UnifiedRadixCache:
    capacity = Capacity(num_pages=num_pages, page_size=PAGE, max_rows=4, max_context_len=70_000, max_step_tokens=8192, vocab_size=50_000)
    capacity = Capacity(**{**{name: getattr(capacity, name) for name in Capacity.__slots__}, **KINDS[kind]})
    return build_cache(CacheArgs(), capacity)


def _admit(cache: UnifiedRadixCache, tokens: Tokens) -> tuple[ReqKvInfo, RadixKey]:
    """A request that has computed all of `tokens`, unshared beyond its match."""
    key = RadixKey(PLAIN, pack(tokens))
    found = cache.match_prefix(key)
    lock, row = cache.inc_lock_ref(found.last_device_node), cache.req_to_token.alloc_row()
    assert row is not None
    length = found.device_prefix_len
    kv = ReqKvInfo(row=row, cache_protected_len=length, kv_committed_len=length, kv_allocated_len=length, lock=lock)
    cache.req_to_token.write(row, 0, found.pages)
    if cache.window is not None:
        cache.window.open(kv, found.window_pages)
    if cache.states is not None:
        opened = cache.states.open(kv, lock.node)
        assert opened
        cache.states.allocator.take_ops()
    grown = cache.grow(kv, len(tokens))
    assert grown
    kv.kv_committed_len = len(tokens)
    return kv, key


def serve(cache: UnifiedRadixCache, tokens: Tokens) -> None:
    """One request from its match to its publication."""
    kv, key = _admit(cache, tokens)
    cache.cache_finished_req(kv, key)
    cache.req_to_token.take_deltas()


def _insert_us(kind: str, rng: np.random.Generator) -> list[float]:
    """`cache_unfinished_req` of 4k new tokens: insert, re-point, lock."""
    cache, times = _cache(kind, num_pages=120_000), []
    for _ in range(INSERTS):
        kv, key = _admit(cache, rng.integers(0, 50_000, size=INSERT_LEN))
        begin = time.perf_counter()
        cache.cache_unfinished_req(kv, key)
        times.append(1e6 * (time.perf_counter() - begin))
        cache.release(kv)
        cache.req_to_token.take_deltas()
    return times


def _evictions(kind: str) -> Measure:
    """One page each, out of a tree of `LEAVES` leaves (a few per cent fewer at the end)."""
    cache = _cache(kind, num_pages=60_000)
    for token in range(LEAVES):
        serve(cache, np.full(PAGE, token))

    def measure() -> list[float]:
        free = cache.free_pages
        times = times_us(lambda: cache.ensure_pages(cache.free_pages + 1), EVICTIONS)
        assert cache.free_pages == free + EVICTIONS, "each call evicts one page"
        return times

    return measure


# ---- the baseline ----------------------------------------------------------------------------------------------------------------------------


def _baseline_with(tokens: Tokens) -> BaselineRadixCache:
    cache, ids = BaselineRadixCache(PAGE), tokens.tolist()
    for length in EDGES:
        cache.insert(ids[:length], np.arange(length, dtype=np.int64))
    return cache


def _baseline_insert_us(rng: np.random.Generator) -> list[float]:
    cache, times = BaselineRadixCache(PAGE), []
    for _ in range(INSERTS):
        ids = rng.integers(0, 50_000, size=INSERT_LEN).tolist()
        slots, node = cache.match_prefix(ids)
        cache.inc_lock_ref(node)
        req = BaselineReq(ids, np.arange(INSERT_LEN, dtype=np.int64), node, protected_len=len(slots))
        begin = time.perf_counter()
        cache.cache_unfinished_req(req)
        times.append(1e6 * (time.perf_counter() - begin))
        cache.dec_lock_ref(req.node)
    return times


def _baseline_evictions() -> Measure:
    cache = BaselineRadixCache(PAGE)
    for token in range(LEAVES):
        cache.insert([token] * PAGE, np.zeros(PAGE, dtype=np.int64))

    def measure() -> list[float]:
        return times_us(lambda: cache.evict(PAGE), BASELINE_EVICTIONS, clock=time.thread_time)

    return measure
