"""The baseline of `make bench-control` is a right cache: it finds what ours finds and what a plain search finds, and evicts oldest first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootlet.bench.control_cache import serve
from rootlet.bench.radix_baseline import BaselineRadixCache, BaselineReq, order_by_lpm
from rootlet.cache.key import pack
from rootlet.cache.registry import build_cache
from rootlet.cache.types import RadixKey
from rootlet.config.schema import CacheArgs
from rootlet.core.step import Capacity
from rootlet.core.types import Namespace

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=12)


def longest(stored: list[list[int]], ids: list[int], page: int) -> int:
    """Whole pages that `ids` shares with any stored sequence's whole pages."""
    best = 0
    for other in stored:
        whole = min(len(other) // page, len(ids) // page)
        same = next((i for i in range(whole) if other[i * page : (i + 1) * page] != ids[i * page : (i + 1) * page]), whole)
        best = max(best, same * page)
    return best


@pytest.mark.parametrize("page", [1, 2, 4])
@given(prompts=PROMPTS)
def test_it_matches_what_ours_and_a_plain_search_match(page: int, prompts: list[list[int]]) -> None:
    ours = build_cache(CacheArgs(), Capacity(200, page, 2, 32, 64, 100))
    theirs = BaselineRadixCache(page)
    stored: list[list[int]] = []
    for ids in prompts:
        expected = longest(stored, ids, page)
        slots, _ = theirs.match_prefix(ids)
        assert len(slots) == expected
        assert ours.match_prefix(RadixKey(Namespace(), pack(ids))).device_prefix_len == expected
        whole = ids[: len(ids) - len(ids) % page]
        known = theirs.insert(whole, np.array([hash(tuple(whole[: i + 1])) for i in range(len(whole))], dtype=np.int64))
        assert known == expected
        if ids:
            serve(ours, np.array(ids, dtype=np.int64))
        stored.append(ids)
        found, _ = theirs.match_prefix(ids)
        assert found.tolist() == [hash(tuple(whole[: i + 1])) for i in range(len(whole))], "the slots are those of this very prefix"


def test_the_oldest_unlocked_leaf_goes_first_and_then_its_parent() -> None:
    freed: list[int] = []
    cache = BaselineRadixCache(1, lambda slots: freed.extend(slots.tolist()))
    cache.insert([1, 2, 3], np.array([10, 11, 12]))
    cache.insert([1, 2, 4], np.array([10, 11, 13]))
    cache.insert([9], np.array([20]))
    node = cache.match_prefix([1, 2, 4])[1]
    cache.inc_lock_ref(node)
    assert cache.evictable_len == 2, "[3] and [9]"
    assert cache.evict(2) == 2
    assert freed == [12, 20], "[3] was touched before [9] came"
    assert cache.evict(5) == 0
    cache.dec_lock_ref(node)
    assert cache.evict(5) == 3
    assert freed[2:] == [13, 10, 11]
    assert cache.match_prefix([1, 2])[0].tolist() == []


def test_a_chunks_end_frees_duplicates_and_moves_the_lock() -> None:
    freed: list[int] = []
    cache = BaselineRadixCache(2, lambda slots: freed.extend(slots.tolist()))
    cache.insert([1, 2, 3, 4], np.array([1, 2, 3, 4]))
    req = BaselineReq([1, 2, 3, 4, 5, 6, 7], np.array([50, 51, 52, 53, 54, 55, 56]), cache.root)
    cache.cache_unfinished_req(req)
    assert freed == [50, 51, 52, 53]
    assert req.row.tolist() == [1, 2, 3, 4, 54, 55, 56]
    assert (req.protected_len, cache.evictable_len) == (6, 0)
    cache.dec_lock_ref(req.node)
    assert cache.evictable_len == 6


def test_its_lpm_puts_long_matches_first_and_followers_last() -> None:
    cache = BaselineRadixCache(1)
    hot, family = list(range(100, 164)), list(range(200, 264))
    cache.insert(hot, np.zeros(64, dtype=np.int64))
    waiting = [BaselineReq(ids, np.zeros(0, dtype=np.int64), cache.root) for ids in ([*family, 1], [*family, 2], [*hot, 1], [7])]
    assert [each.ids[-1] for each in order_by_lpm(waiting, cache)] == [1, 1, 7, 2]
    assert order_by_lpm(waiting, cache)[0] is waiting[2]
    assert order_by_lpm(waiting, cache, limit=3) == waiting, "beyond the limit by arrival"
