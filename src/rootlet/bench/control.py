"""What the prefix cache costs, in microseconds beside the targets of the design: `make bench-control`. One thread, no model, no torch.

Medians over many single calls, each after the work of the one before it was undone outside the clock. Prompts are distinct random tokens.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, slots=True)
class Row:
    """`target_us`: of the design, for full attention."""

    name: str
    target_us: float
    times_us: list[float]


def main() -> None:
    gc.disable()
    print(f"{'operation':28} {'target us':>9}  " + "  ".join(f"{kind:>22}" for kind in KINDS))
    print(f"{'':28} {'':>9}  " + "  ".join(f"{'median (p90)':>22}" for _ in KINDS))
    columns = [_measure(kind) for kind in KINDS]
    for rows in zip(*columns, strict=True):
        cells = (f"{statistics.median(row.times_us):8.1f} ({statistics.quantiles(row.times_us, n=10)[-1]:8.1f})" for row in rows)
        print(f"{rows[0].name:28} {rows[0].target_us:9.0f}  " + "  ".join(f"{cell:>22}" for cell in cells))


def _measure(kind: str) -> list[Row]:
    rng = np.random.default_rng(0)
    cache = _cache(kind, num_pages=120_000)
    # three edges: what three requests of the same prefix leave
    long = rng.integers(0, 50_000, size=65_536)
    for length in (9_984, 40_000, 65_536):
        _serve(cache, long[:length])
    whole, short = RadixKey(PLAIN, pack(long)), RadixKey(PLAIN, pack(long[:4_096]))
    node = cache.match_prefix(whole).last_device_node
    rows = [
        Row("probe 4k tokens", 10, _times(lambda: cache.probe(short))),
        Row("match 4k tokens", 10, _times(lambda: cache.match_prefix(short))),
        Row("match 64k tokens", 50, _times(lambda: cache.match_prefix(whole))),
        Row("lock + unlock", 4, _times(lambda: cache.dec_lock_ref(cache.inc_lock_ref(node)))),
        Row("insert 4k tokens (new)", 20, _insert_times(kind, rng)),
    ]
    cache = _cache(kind, num_pages=60_000)
    for token in range(50_000):
        _serve(cache, np.full(PAGE, token))
    free = cache.free_pages
    rows.append(Row("evict a page, 50k leaves", 10, _times(lambda: cache.ensure_pages(_next(cache)), number=1_000)))
    assert cache.free_pages == free + 1_000
    return rows


def _next(cache: UnifiedRadixCache) -> int:
    return cache.free_pages + 1


def _cache(kind: str, *, num_pages: int) -> UnifiedRadixCache:
    capacity = Capacity(num_pages=num_pages, page_size=PAGE, max_rows=4, max_context_len=70_000, max_step_tokens=8192, vocab_size=50_000)
    capacity = Capacity(**{**{name: getattr(capacity, name) for name in Capacity.__slots__}, **KINDS[kind]})
    return build_cache(CacheArgs(), capacity)


def _admit(cache: UnifiedRadixCache, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[ReqKvInfo, RadixKey]:
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


def _serve(cache: UnifiedRadixCache, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    kv, key = _admit(cache, tokens)
    cache.cache_finished_req(kv, key)
    cache.req_to_token.take_deltas()


def _insert_times(kind: str, rng: np.random.Generator, *, number: int = 200) -> list[float]:
    """`cache_unfinished_req` of 4k new tokens: insert, re-point, lock."""
    cache, times = _cache(kind, num_pages=120_000), []
    for _ in range(number):
        kv, key = _admit(cache, rng.integers(0, 50_000, size=4_096))
        begin = time.perf_counter()
        cache.cache_unfinished_req(kv, key)
        times.append(1e6 * (time.perf_counter() - begin))
        cache.release(kv)
        cache.req_to_token.take_deltas()
    return times


def _times(work: Callable[[], object], *, number: int = 2_000) -> list[float]:
    times = []
    for _ in range(number):
        begin = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - begin))
    return times


if __name__ == "__main__":
    main()
