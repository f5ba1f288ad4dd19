"""Field bugs of caches with recurrent states, one smallest example each: row NN of the design's table of field bugs."""

from __future__ import annotations

import pytest

from fixtures.cache_bench import PLAIN, CacheBench
from rootlet.cache.key import pack
from rootlet.cache.types import RadixKey, ReqKvInfo


def bench_of(grid: int = 1, *, page_size: int = 1, slots: int = 16, window: tuple[int, int] | None = None) -> CacheBench:
    return CacheBench(page_size=page_size, states=(grid, slots), window=window)


def key(tokens: list[int]) -> RadixKey:
    return RadixKey(PLAIN, pack(tokens))


def states(bench: CacheBench) -> list[tuple[int, ...]]:
    """Paths that have a state."""
    return sorted(path for _, _, path, node in bench.spans() if node.state_slot is not None)


def test_row_05_a_prompt_below_the_page_size_ends_without_a_trace() -> None:
    bench = bench_of(32, page_size=32)
    seq = bench.run(list(range(29)))
    bench.unfinished(seq)
    bench.check()
    bench.finish(seq)
    bench.check()
    assert (bench.states.allocator.pool.num_free, bench.cache.free_pages, bench.cache.core.num_locks) == (16, 64, 0)


def test_row_26_an_early_release_leaves_no_held_state_on_a_window_that_can_go() -> None:
    bench = bench_of(window=(2, 32))
    seq = bench.run([1, 2])
    bench.unfinished(seq)
    seq.tokens += [3, 4, 5]
    assert bench.compute(seq, 5)
    bench.window.let_go(seq.kv)
    bench.check()
    assert bench.cache.keeper.ensure("swa", bench.window.allocator.pages.num_free + 2)
    bench.check()
    assert ([node.full_pages is not None for *_, node in bench.spans()], states(bench), bench.cache.protected_pages) == ([True], [], 2)
    bench.finish(seq)
    bench.check()


def test_row_38_a_working_state_comes_back_when_admission_fails_after_all() -> None:
    bench = bench_of()
    bench.serve([1, 2])
    lock = bench.inc(key([1, 2]))
    kv = ReqKvInfo()
    assert bench.states.open(kv, lock.node)
    assert bench.states.allocator.pool.num_free == 14
    bench.states.close(kv)
    assert kv == ReqKvInfo()
    bench.drop(lock)
    bench.check()
    assert bench.states.allocator.pool.num_free == 15


def test_row_39_a_state_that_cannot_be_donated_is_skipped() -> None:
    bench = bench_of(slots=2)
    one, two = bench.run([1, 2]), bench.run([3, 4])
    bench.unfinished(one)  # wants a snapshot; both slots are working states
    assert (one.kv.cache_protected_len, states(bench)) == (0, [])
    bench.check()
    bench.release(two)
    bench.unfinished(one)
    assert (one.kv.cache_protected_len, states(bench)) == (2, [(1, 2)])
    two = bench.seq([3, 4])
    assert not bench.admit(two)  # the tree's state is held, the other one works
    bench.check()
    bench.finish(one)
    assert bench.admit(two)
    bench.check()


@pytest.mark.parametrize("length", range(4, 14))
def test_row_40_a_state_encodes_exactly_the_tokens_of_its_node(length: int) -> None:
    bench = bench_of(4, page_size=2)
    seq = bench.run(list(range(length)))
    bench.unfinished(seq)
    bench.finish(seq)
    bench.check()
    assert [len(path) for path in states(bench)] == ([length] if length % 4 == 0 else [])
    assert bench.probe(list(range(length))) == (length if length % 4 == 0 else 0)


def test_a_snapshot_inside_the_prompt_is_shared_when_the_end_is_off_the_grid() -> None:
    bench = bench_of(4, page_size=2)
    seq = bench.seq(list(range(11)))
    assert bench.admit(seq)
    assert bench.compute(seq, 8)
    assert bench.states.snapshot(seq.kv)
    assert bench.compute(seq, 11)
    bench.finish(seq)
    bench.check()
    assert (states(bench), bench.probe(list(range(11)))) == ([tuple(range(8))], 8)


def test_with_windows_the_slide_leaves_a_whole_window_of_the_snapshot() -> None:
    bench = bench_of(4, window=(2, 32))
    seq = bench.seq(list(range(15)))
    assert bench.admit(seq)
    assert bench.compute(seq, 8)
    assert bench.states.snapshot(seq.kv)
    for length in range(9, 16):
        assert bench.compute(seq, length)
        bench.window.slide(seq.kv, length)
    assert seq.kv.window_released_len == 5
    bench.finish(seq)
    bench.check()
    assert bench.probe(list(range(15))) == 8


def test_row_42_progress_does_not_depend_on_insertion() -> None:
    bench = bench_of(8)
    seq = bench.seq(list(range(6)))
    assert bench.admit(seq)
    for end in (2, 4, 6):
        assert bench.compute(seq, end)
        bench.unfinished(seq)
        assert (seq.kv.kv_allocated_len, seq.kv.cache_protected_len, bench.cache.free_pages) == (end, 0, 64 - end)
    bench.check()


def test_row_53_a_state_deeper_or_higher_is_no_state_here() -> None:
    bench = bench_of()
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        bench.serve(tokens)
    middle = bench.inc(key([1, 2, 3, 4])).node
    bench.drop(bench.locks[-1])
    bench.cache.keeper.execute([bench.states.component.drop(middle)])
    assert [bench.probe([1, 2, 3, 4, 5, 6][:n]) for n in range(7)] == [0, 0, 2, 2, 2, 2, 6]
    bench.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_row_54_the_second_sharer_makes_the_state_that_the_third_hits(page_size: int) -> None:
    bench = CacheBench(page_size=page_size, num_pages=8000, pages_per_row=4000, states=(64, 8))
    shared = [i % 11 for i in range(1500)]

    def serve(unique: int) -> tuple[int, int | None]:
        seq = bench.seq(shared + [unique] * 700)
        assert bench.admit(seq)
        hit, branch = seq.kv.kv_committed_len, seq.branch_at
        for stop in (branch, 2200 // 64 * 64):
            if stop is not None:
                assert bench.compute(seq, stop)
                bench.unfinished(seq)
        assert bench.compute(seq, 2200)
        bench.finish(seq)
        return hit, branch

    assert [serve(100), serve(101), serve(102)] == [(0, None), (0, 1472), (1472, None)]


def test_a_working_state_is_a_copy_so_a_branch_does_not_disturb_its_origin() -> None:
    bench = bench_of()
    bench.serve([1, 2])
    one, two = bench.run([1, 2, 3]), bench.run([1, 2, 4])
    bench.check()
    assert bench.states.component.protected == 1
    bench.finish(one)
    bench.finish(two)
    bench.check()
    assert states(bench) == [(1, 2), (1, 2, 3), (1, 2, 4)]


def test_a_donated_state_is_freed_where_the_tree_has_one() -> None:
    bench = bench_of()
    one, two = bench.run([1, 2]), bench.run([1, 2])
    bench.finish(one)
    bench.finish(two)
    bench.check()
    assert (states(bench), bench.states.allocator.pool.num_free) == ([(1, 2)], 15)


def test_a_state_is_evicted_alone_inside_the_tree_and_with_its_leaf_at_the_end() -> None:
    bench = bench_of()
    bench.serve([1, 2])
    bench.serve([1, 2, 3])
    assert bench.cache.keeper.ensure("mamba", 15)
    assert (states(bench), bench.cache.evictable_pages) == ([(1, 2, 3)], 3)
    assert bench.cache.keeper.ensure("mamba", 16)
    assert (states(bench), bench.cache.evictable_pages) == ([], 2)
    bench.check()
