"""Field bugs of sliding-window caches, one smallest example each: row NN of the design's table of field bugs."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.cache_bench import PLAIN, CacheBench, Seq
from rootlet.cache.key import pack
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import RadixKey, ReqKvInfo


def bench_of(window_len: int, page_size: int = 1, *, pages: int = 64, window_pages: int = 64) -> CacheBench:
    return CacheBench(page_size=page_size, num_pages=pages, window=(window_len, window_pages))


def key(tokens: list[int]) -> RadixKey:
    return RadixKey(PLAIN, pack(tokens))


def live(bench: CacheBench) -> list[tuple[int, int, bool]]:
    """(start, end, has window pages) of all nodes."""
    return sorted((start, len(path), node.swa_pages is not None) for _, start, path, node in bench.spans())


def node_at(bench: CacheBench, *path: int) -> UnifiedTreeNode:
    return next(node for _, _, tokens, node in bench.spans() if tokens == path)


def evict_windows(bench: CacheBench, n: int) -> None:
    assert bench.cache.keeper.ensure("swa", bench.window.allocator.pages.num_free + n)


def grown(bench: CacheBench, seq: Seq, tokens: list[int]) -> None:
    seq.tokens += tokens
    assert bench.compute(seq, len(seq.tokens))


def test_row_24_a_tombstone_under_lock_is_counted_and_may_be_revived_there() -> None:
    bench = bench_of(4)
    bench.serve([1, 2, 3, 4])
    one = bench.inc(key([1, 2, 3, 4]))
    bench.window.component.let_go(one)
    evict_windows(bench, 4)
    assert live(bench) == [(0, 4, False)]
    two = bench.cache.inc_lock_ref(node_at(bench, 1, 2, 3, 4))  # over the tombstone
    bench.locks.append(two)
    bench.serve([1, 2, 3, 4])  # revives
    three = bench.inc(key([1, 2, 3, 4]))
    assert (node_at(bench, 1, 2, 3, 4).swa_refs, bench.window.component.protected) == (2, 4)
    for lock in (two, one, three):
        bench.drop(lock)
        bench.check()
    assert (bench.window.component.protected, bench.window.component.evictable) == (0, 4)


def test_row_25_a_temporary_lock_takes_nothing_of_the_others() -> None:
    bench = bench_of(3)
    bench.serve([1, 2, 3, 4, 5, 6])
    one, two = (bench.run([1, 2, 3, 4, 5, 6, last]) for last in (7, 8))
    bench.drop(bench.inc(key([1, 2, 3, 4, 5, 6])))
    assert node_at(bench, 1, 2, 3, 4, 5, 6).swa_refs == 2
    assert {seq.kv.lock.window_from for seq in (one, two)} == {3}
    bench.check()


def test_rows_28_and_30_churn_over_revived_tombstones_keeps_every_window_page() -> None:
    bench = bench_of(2, 2, pages=24, window_pages=9)
    for i in range(40):
        seq = bench.run([1, 2, 3, 4, 5, i % 3, i % 5])
        bench.unfinished(seq)
        for token in range(4):
            grown(bench, seq, [token])
            bench.window.slide(seq.kv, seq.kv.kv_committed_len)
            bench.window.let_go(seq.kv)
            bench.check()
        bench.finish(seq)
        evict_windows(bench, i % 2)
        bench.check()


@pytest.mark.parametrize("page_size", [2, 4])
def test_row_29_window_pages_go_back_whole_and_once(page_size: int) -> None:
    bench = bench_of(1, page_size)
    seq = bench.run(list(range(3 * page_size)))
    for length in range(3 * page_size + 1):
        bench.window.slide(seq.kv, length)
        bench.check()
    bench.release(seq)
    bench.check()
    assert bench.window.allocator.pages.num_free == 64


def test_row_31_page_0_is_never_a_window_page() -> None:
    bench = bench_of(2)
    bench.serve(list(range(12)))
    assert live(bench) == [(0, 9, False), (9, 10, True), (10, 12, True)]
    assert bench.cache.flush()
    assert 0 not in bench.window.allocator.pages.free_pages()
    node = UnifiedTreeNode(seq=0, tick=0, key=pack([1]), start=0, end=1, parent=bench.cache.core.root)
    with pytest.raises(AssertionError, match="C7"):
        bench.window.component.adopt(node, np.zeros(1, dtype=np.int32), 0)


@pytest.mark.parametrize(("page", "window", "length", "want"), [(1, 4, 20, 15), (8, 2, 11, 0), (64, 127, 1024, 832)])
def test_row_32_and_33_the_slide_leaves_a_whole_window_of_the_key(page: int, window: int, length: int, want: int) -> None:
    bench = CacheBench(page_size=page, num_pages=1100, pages_per_row=1100, window=(window, 1100))
    seq = bench.run([i % 7 for i in range(length)])
    bench.window.slide(seq.kv, length)
    assert seq.kv.window_released_len == want


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("window_len", range(1, 10))
def test_row_32_the_last_leaf_is_never_all_tombstone(page_size: int, window_len: int) -> None:
    for length in range(page_size, 30):
        bench = bench_of(window_len, page_size)
        tokens = list(range(length))
        bench.serve(tokens)
        bench.check()
        assert bench.probe(tokens) == length // page_size * page_size


def test_without_sharing_the_slide_keeps_just_the_window() -> None:
    bench = CacheBench(page_size=4, window=(2, 64), enabled=False)
    seq = bench.run(list(range(11)))
    bench.window.slide(seq.kv, 11)
    assert seq.kv.window_released_len == 8
    bench.check()
    bench.finish(seq)
    assert bench.window.allocator.pages.num_free == 64


def test_row_34_an_unfinished_request_shares_no_window_that_it_gave_back() -> None:
    bench = bench_of(3)
    seq = bench.run([1, 2, 3, 4, 5, 6, 7, 8])
    bench.window.slide(seq.kv, 8)
    assert seq.kv.window_released_len == 4
    bench.unfinished(seq)
    assert live(bench) == [(0, 4, False), (4, 5, True), (5, 8, True)]
    bench.check()
    assert (bench.probe([1, 2, 3, 4]), bench.probe([1, 2, 3, 4, 5]), bench.probe([1, 2, 3, 4, 5, 6, 7, 8])) == (0, 0, 8)


def test_row_35_window_pages_are_found_inside_the_tree_when_only_they_are_short() -> None:
    bench = bench_of(4, window_pages=10)
    bench.serve([1, 2, 3, 4])
    bench.serve([1, 2, 3, 4, 5])
    bench.locks.append(bench.cache.inc_lock_ref(node_at(bench, 1, 2, 3, 4, 5)))
    bench.window.component.let_go(bench.locks[0])
    free = bench.cache.free_pages
    assert bench.cache.evictable_pages == 0
    evict_windows(bench, 4)
    assert live(bench) == [(0, 4, False), (4, 5, True)]
    assert bench.cache.free_pages == free
    bench.check()


def test_row_36_what_lies_behind_the_window_ages() -> None:
    bench = bench_of(2)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        bench.serve(tokens)
    bench.serve([9, 9])
    bench.cache.match_prefix(key([1, 2, 3, 4, 5, 6]))
    evict_windows(bench, 4)
    assert live(bench) == [(0, 2, False), (0, 2, True), (2, 4, False), (4, 6, True)]
    assert bench.probe([9, 9]) == 2


def test_row_37_an_idle_branch_keeps_its_last_window_while_busy_ones_have_passed_theirs() -> None:
    bench = bench_of(2)
    bench.serve([9, 8, 7, 6])
    busy = [1, 2, 3, 4]
    for token in range(10, 18):
        bench.serve(busy)
        busy += [token, token]
    evict_windows(bench, bench.window.component.evictable - 4)  # all but two last windows
    assert bench.probe([9, 8, 7, 6]) == 4
    assert bench.probe(busy[:-2]) == len(busy) - 2
    evict_windows(bench, 2)
    assert bench.probe([9, 8, 7, 6]) == 0
    bench.check()


@pytest.mark.parametrize("gap", range(6))
def test_row_53_a_match_ends_where_the_last_window_is_live(gap: int) -> None:
    """Six nodes of two tokens, W = 4, node `gap` a tombstone: a match may end above it, or two nodes below."""
    bench = bench_of(4)
    tokens = list(range(12))
    for length in range(2, 13, 2):
        bench.serve(tokens[:length])
    node = node_at(bench, *tokens[: 2 * gap + 2])
    bench.cache.keeper.execute([bench.window.component.drop(node)])
    ends = [0, *(n for n in range(2, 13, 2) if n <= 2 * gap or n >= 2 * gap + 6)]
    for length in range(13):
        assert bench.probe(tokens[:length]) == max(end for end in [*ends, *_inside(length, gap)] if end <= length)
    bench.check()


def _inside(length: int, gap: int) -> list[int]:
    """The walk may end inside an edge: then the window must be live up to there."""
    return [length] if length <= 2 * gap or length >= 2 * gap + 6 else []


def test_the_second_sharer_of_a_tombstoned_prefix_revives_it_for_the_third() -> None:
    bench = bench_of(2)
    bench.serve([1, 2, 3, 4, 5, 6, 7, 8])
    seq = bench.seq([1, 2, 3, 4, 9, 9, 9, 9])
    assert bench.admit(seq)
    assert (seq.kv.kv_committed_len, seq.branch_at) == (0, 4)
    assert bench.compute(seq, seq.branch_at)
    bench.unfinished(seq)
    assert bench.compute(seq, 8)
    bench.finish(seq)
    bench.check()
    assert bench.probe([1, 2, 3, 4, 7, 7]) == 4


def test_growing_takes_pages_of_both_pools_or_of_neither() -> None:
    bench = bench_of(4, window_pages=6)
    bench.serve([1, 2, 3])
    seq = bench.seq([5] * 8)
    assert bench.admit(seq)
    free = bench.cache.free_pages
    assert not bench.reserve(seq, 7)
    assert (bench.cache.free_pages, bench.window.allocator.pages.num_free, seq.kv.kv_allocated_len) == (free, 3, 0)
    assert bench.reserve(seq, 6)
    bench.release(seq)
    bench.check()
    assert seq.kv == ReqKvInfo()
