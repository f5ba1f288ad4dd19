"""The controller's surface: exact eviction, prompt boundary, disabled cache, views, and that `check` sees each kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fixtures.cache_bench import CacheBench
from rootlet.cache.key import pack
from rootlet.cache.registry import build_cache
from rootlet.cache.types import RadixKey, ReqKvInfo, TreeLock
from rootlet.config.schema import CacheArgs
from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity
from rootlet.core.types import Namespace


def paths(bench: CacheBench) -> list[tuple[int, ...]]:
    return sorted(path for _, _, path, _ in bench.spans())


@pytest.mark.parametrize("short", range(1, 9))
def test_exactly_the_missing_pages_are_evicted(short: int) -> None:
    bench = CacheBench(page_size=2, num_pages=8)
    bench.serve([1, 2, 3, 4, 5, 6, 7, 8])
    bench.serve([1, 2, 9, 9, 9, 9, 9, 9])
    free = bench.cache.free_pages
    assert bench.cache.ensure_pages(short) == (short <= 8)
    assert bench.cache.free_pages == max(free, short)
    bench.check()


def test_a_long_leaf_is_trimmed_from_its_tail() -> None:
    bench = CacheBench(page_size=1, num_pages=6)
    bench.serve([1, 2, 3, 4, 5, 6])
    assert len(bench.cache.alloc_pages(2)) == 2
    assert paths(bench) == [(1, 2, 3, 4)]
    assert bench.cache.stats()["evicted_pages"] == 2


def test_outputs_are_evicted_before_the_prompt_they_grew_from() -> None:
    bench = CacheBench(page_size=2, policy="lru")
    seq = bench.run([1, 2, 3, 4, 5])
    seq.tokens += [11, 12, 13]
    assert bench.compute(seq, 8)
    bench.finish(seq, prompt_len=5)
    assert paths(bench) == [(1, 2, 3, 4), (1, 2, 3, 4, 5, 11, 12, 13)]
    bench.check()


def test_the_prompt_boundary_is_made_inside_what_another_request_cached_in_one_piece() -> None:
    bench = CacheBench(page_size=1)
    one, two = bench.run([1, 2, 3, 4, 5, 6]), bench.run([1, 2, 3])
    bench.finish(one)
    two.tokens += [4, 5]
    assert bench.compute(two, 5)
    bench.finish(two, prompt_len=3)
    assert paths(bench) == [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6)]
    bench.check()


def test_a_prompt_boundary_below_what_is_protected_takes_nothing_back() -> None:
    bench = CacheBench(page_size=1)
    seq = bench.run([1, 2, 3, 4])
    bench.unfinished(seq)
    bench.finish(seq, prompt_len=2)
    assert paths(bench) == [(1, 2), (1, 2, 3, 4)]
    bench.check()


def test_priority_is_the_highest_that_used_a_path() -> None:
    bench = CacheBench(page_size=1, policy="priority")
    bench.serve([1, 2], priority=5)
    bench.serve([3, 4], priority=1)
    bench.serve([3, 4, 5], priority=-7)
    assert bench.cache.ensure_pages(bench.cache.free_pages + 3)
    assert paths(bench) == [(1, 2)]
    bench.check()


def test_a_disabled_cache_holds_nothing_and_releases_everything() -> None:
    bench = CacheBench(page_size=2, enabled=False)
    one, two = bench.run([1, 2, 3, 4, 5]), bench.run([1, 2, 3, 4, 5])
    bench.unfinished(one)
    assert (two.kv.cache_protected_len, bench.cache.free_pages) == (0, 58)
    bench.check()
    bench.finish(one, prompt_len=5)
    bench.release(two)
    bench.check()
    assert (bench.cache.free_pages, bench.cache.stats()["nodes"], bench.cache.flush()) == (64, 0, True)


def test_build_cache_follows_the_configuration_and_the_capacity() -> None:
    capacity = Capacity(num_pages=7, page_size=4, max_rows=3, max_context_len=10, max_step_tokens=8, vocab_size=9)
    cache = build_cache(CacheArgs(page_size=16, prefix_cache=False, evict="slru"), capacity)
    assert (cache.page_size, cache.enabled, cache.free_pages) == (4, False, 7)
    assert (cache.req_to_token.max_rows, cache.req_to_token.max_pages_per_row) == (3, 3)
    with pytest.raises(BadConfig, match=r"unknown eviction policy 'lrru'; did you mean 'lru'"):
        build_cache(CacheArgs(evict="lrru"), capacity)


def test_build_cache_adds_the_components_that_the_capacity_names() -> None:
    fields = {"num_pages": 7, "page_size": 4, "max_rows": 3, "max_context_len": 10, "max_step_tokens": 8, "vocab_size": 9}

    def names(**more: int) -> list[str]:
        return list(build_cache(CacheArgs(), Capacity(**fields, **more)).keeper.pools)

    window, states = {"window_len": 6, "num_window_pages": 3}, {"num_states": 2, "state_grid": 8}
    assert (names(), names(**window), names(**states)) == (["full"], ["full", "swa"], ["full", "mamba"])
    assert names(**window, **states) == ["full", "swa", "mamba"]
    with pytest.raises(BadConfig, match=r"2 window pages: a window of 6 tokens needs 3 pages of 4"):
        names(window_len=6, num_window_pages=2)
    with pytest.raises(BadConfig, match=r"states every 6 tokens: must be a multiple of page_size 4"):
        names(num_states=2, state_grid=6)


def test_stats_count_pages_and_tokens() -> None:
    bench = CacheBench(page_size=2, num_pages=10)
    bench.serve([1, 2, 3, 4])
    seq = bench.run([1, 2, 3, 4, 5])
    assert bench.cache.stats() == {
        "total_pages": 10,
        "free_pages": 7,
        "evictable_pages": 0,
        "protected_pages": 2,
        "private_pages": 1,
        "usage": 1.0 - 7 / 10,
        "nodes": 1,
        "namespaces": 1,
        "locks": 1,
        "rows": 1,
        "epoch": 0,
        "matches": 2,
        "lookup_tokens": 3 + 4,
        "matched_tokens": 4,
        "adopted_pages": 2,
        "duplicate_pages": 0,
        "hit_tokens": {"device": {"all": 4, "full": 4}},
        "evictions": {"device": {}},
        "evicted_pages": 0,
    }
    bench.release(seq)


def test_evictions_are_counted_by_what_they_were_for() -> None:
    bench = CacheBench(page_size=2, num_pages=8, window=(3, 8), states=(2, 3))
    for prompt in ([1] * 4, [2] * 4, [3] * 4):
        bench.serve(prompt)
    seq = bench.seq([4] * 9)
    assert bench.admit(seq)  # one state goes, for the working one, and its leaf with it
    assert bench.compute(seq, 2)
    assert bench.cache.ensure_pages(bench.cache.free_pages + 1)  # the tail of a leaf, and the state at its end
    assert bench.compute(seq, 8)
    bench.finish(seq)  # its first window page was given back
    assert bench.cache.flush()
    assert bench.cache.stats()["evictions"] == {
        "device": {
            "full": {"admission": 2, "flush": 1 + 2 + 4, "requested": 1},
            "mamba": {"admission": 1, "flush": 2, "requested": 1},
            "swa": {"admission": 2, "flush": 1 + 2 + 3, "requested": 1},
        }
    }


def test_a_snapshot_that_takes_a_state_of_the_tree_is_counted() -> None:
    bench = CacheBench(page_size=2, states=(2, 2))
    bench.serve([1] * 4)
    seq = bench.seq([2] * 3)
    assert bench.admit(seq)
    assert bench.compute(seq, 2)
    assert bench.cache.states.snapshot(seq.kv)
    assert bench.cache.stats()["evictions"] == {"device": {"full": {"snapshot": 2}, "mamba": {"snapshot": 1}}}


def test_growth_and_admission_are_told_apart() -> None:
    bench = CacheBench(page_size=1, num_pages=4)
    bench.serve([1, 2, 3])
    seq = bench.run([7, 8])
    assert bench.cache.stats()["evictions"] == {"device": {"full": {"growth": 1}}}
    assert bench.cache.alloc_pages(2) is not None
    assert bench.cache.stats()["evictions"] == {"device": {"full": {"admission": 2, "growth": 1}}}
    assert bench.cache.stats()["private_pages"] == 4
    assert seq.kv.kv_allocated_len == 2


def test_a_page_that_nobody_counts_shows_in_the_ledger() -> None:
    bench = CacheBench(page_size=2, num_pages=10)
    seq = bench.run([1, 2, 3])
    assert bench.cache.keeper.ledger("full").dump() == {"total": 10, "free": 8, "evictable": 0, "protected": 0, "private": 2, "leaked": 0}
    bench.cache.allocator.alloc(1)
    bench.release(seq)
    assert bench.cache.keeper.ledger("full").dump() == {"total": 10, "free": 9, "evictable": 0, "protected": 0, "private": 0, "leaked": 1}


def test_hits_are_counted_by_component() -> None:
    """Full attention alone would hit 6 tokens, its state is at 4, and a window of 3 is whole everywhere."""
    bench = CacheBench(page_size=2, window=(3, 40), states=(4, 9))
    seq = bench.run([1, 2, 3, 4])
    bench.finish(seq)
    bench.serve([1, 2, 3, 4, 5, 6, 7, 8])
    before = bench.cache.stats()["hit_tokens"]["device"]
    bench.cache.match_prefix(RadixKey(Namespace(), pack([1, 2, 3, 4, 5, 6])))
    after = bench.cache.stats()["hit_tokens"]["device"]
    assert {name: after[name] - before[name] for name in after} == {"all": 4, "full": 6, "swa": 6, "mamba": 4}


def test_pretty_draws_the_tree() -> None:
    bench = CacheBench(page_size=1)
    bench.serve(list(range(1, 13)))
    bench.serve([1, 2, 70])
    bench.serve([9], Namespace(lora_id="poet", cache_salt="s"))
    bench.locks.append(bench.cache.inc_lock_ref(next(node for _, _, path, node in bench.spans() if path == (1, 2, 70))))
    assert bench.cache.pretty().splitlines() == [
        "radix tree: 4 nodes, 2 namespaces, 1 locks, page 1, epoch 0",
        "(no namespace)",
        "+- [0, 2) tokens 1 2 pages 1 2 locks 0* hits 2",
        "|  +- [2, 12) tokens 3 4 5 6 .. 9 10 11 12 (10) pages 3 4 5 6 .. 9 10 11 12 (10) locks 0 hits 1",
        "|  +- [2, 3) tokens 70 pages 13 locks 1* hits 1",
        "lora_id='poet', cache_salt='s'",
        "+- [0, 1) tokens 9 pages 14 locks 0 hits 1",
    ]
    assert bench.cache.pretty(max_nodes=1).splitlines()[2:] == [
        "+- [0, 2) tokens 1 2 pages 1 2 locks 0* hits 2",
        "lora_id='poet', cache_salt='s'",
        "... 3 more nodes",
    ]


def test_pretty_shows_where_windows_and_states_are() -> None:
    bench = CacheBench(page_size=1, window=(2, 9), states=(1, 9))
    bench.serve([1, 2, 3, 4])
    assert bench.cache.pretty().splitlines()[2:] == [
        "+- [0, 1) tokens 1 pages 1 locks 0 hits 1 swa 0 mamba 0",
        "|  +- [1, 2) tokens 2 pages 2 locks 0 hits 1 swa 1 mamba 0",
        "|  |  +- [2, 4) tokens 3 4 pages 3 4 locks 0 hits 1 swa 2 mamba 1",
    ]


# ---- `check` can see ---------------------------------------------------------------------------------------------------------------------


def _first(bench: CacheBench) -> object:
    return next(bench.cache.core.nodes())


def _last(bench: CacheBench) -> object:
    """A node below a node."""
    return [node for node in bench.cache.core.nodes() if node.start > 0][-1]


DAMAGE: dict[str, Callable[[CacheBench], object]] = {
    "C1: .1 pages .deficit: leak": lambda b: b.cache.allocator.alloc(1),
    "C1: .1 pages .excess": lambda b: setattr(b.live[0].kv, "kv_allocated_len", 7),
    "C1: requests hold 1 units of their own, 3 counted": lambda b: b.cache.keeper.private.update(full=3),
    "C2": lambda b: setattr(b.cache.full, "evictable", 9),
    "C5": lambda b: b.rows.alloc_row(),
    "C7: pages": lambda b: b.rows.write(b.live[0].kv.row, 2, b.rows.pages(b.live[0].kv.row, 0, 1)),
    "S1: .* is not the child": lambda b: setattr(_first(b), "key", b"y" * len(_first(b).key)),
    "S1: 4 nodes": lambda b: setattr(b.cache.core, "num_nodes", 5),
    "S2": lambda b: setattr(_first(b), "start", 1),
    "S3": lambda b: setattr(_first(b), "full_pages", _first(b).full_pages[:1]),
    "S4": lambda b: setattr(_first(b), "full_pages", None),
    "S5: priority": lambda b: setattr(_last(b), "priority", 9),
    "S7: the empty root": lambda b: b.cache.core._open_root(b.key(b.seq([1], Namespace("new")))),
    "S7: .* claims a namespace": lambda b: setattr(_first(b), "namespace", Namespace()),
    "L1": lambda b: setattr(b.live[0].kv.lock, "released", True),
    "L2: pins": lambda b: setattr(_first(b), "pins", 3),
    "L2: .* active children": lambda b: setattr(_first(b), "active_children", 1),
    "L2: 1 locks are held": lambda b: setattr(b.cache.core, "num_locks", 2),
    "L4: a lock is anchored": lambda b: b.locks.append(TreeLock(b.cache.core._new_node(key=b"", start=0, end=0, parent=None), 0)),
    "L4: the lock": lambda b: setattr(b.live[0].kv, "cache_protected_len", 2),
    "R1": lambda b: setattr(b.live[0].kv, "kv_committed_len", 7),
    "R2": lambda b: b.rows.write(b.live[0].kv.row, 0, b.rows.pages(b.live[0].kv.row, 1, 2)),
    "R5": lambda b: b.live.append(type(b.live[0])(Namespace(), [1], 1, kv=ReqKvInfo(kv_allocated_len=1))),
    "E1": lambda b: b.cache.full._candidates._entries.clear(),
}


@pytest.mark.parametrize("law", DAMAGE)
def test_check_names_the_law_that_was_broken(law: str) -> None:
    bench = CacheBench(page_size=2)
    bench.serve([8, 8, 8, 8])
    bench.finish(bench.run([7, 7, 7, 7]), prompt_len=2)
    bench.unfinished(bench.run([1, 2, 3, 4, 5]))
    bench.check()
    DAMAGE[law](bench)
    with pytest.raises(AssertionError, match="^" + law):
        bench.cache.check([seq.kv for seq in bench.live], locks=bench.locks)


def test_e4_pages_that_count_as_evictable_without_a_candidate() -> None:
    bench = CacheBench(page_size=2)
    bench.serve([1, 2, 3, 4])
    bench.cache.full._candidates._entries.clear()
    with pytest.raises(AssertionError, match=r"^E4"):
        bench.cache.ensure_pages(bench.cache.available_pages)


OTHER_DAMAGE: dict[str, Callable[[CacheBench], object]] = {
    "C3: .1 pages .deficit: leak": lambda b: b.window.allocator.pages.alloc(1),
    "C4: .1 pages .deficit: leak": lambda b: b.states.allocator.pool.alloc(1),
    "C3: requests hold": lambda b: b.cache.keeper.private.update(swa=9),
    "C4: requests hold": lambda b: b.cache.keeper.private.update(mamba=9),
    "C2: .* window": lambda b: setattr(b.window.component, "protected", 9),
    "C2: .* states": lambda b: setattr(b.states.component, "protected", 9),
    "E4: .* window": lambda b: setattr(b.window.component, "evictable", 9),
    "E4: .* states": lambda b: setattr(b.states.component, "evictable", 9),
    "S3: window pages": lambda b: setattr(_first(b), "swa_pages", _first(b).swa_pages[:1]),
    "L3: .* window": lambda b: setattr(_first(b), "swa_refs", 3),
    "L3: .* state": lambda b: setattr(_first(b), "state_refs", 3),
    "R2: window": lambda b: b.window.allocator.table.write(b.live[0].kv.row, 1, b.window.allocator.table.pages(b.live[0].kv.row, 0, 1)),
    "R4": lambda b: b.window.allocator.give_back(b.live[0].kv.row, 2, 3),
    "S6": lambda b: b.live[0].kv.snapshots.append((4, 1)),
    "E3": lambda b: b.window.component._candidates._entries.clear(),
}


@pytest.mark.parametrize("law", OTHER_DAMAGE)
def test_check_names_the_law_of_a_window_or_a_state_that_was_broken(law: str) -> None:
    bench = CacheBench(page_size=2, window=(4, 20), states=(2, 9))
    bench.serve([8, 8, 8, 8])
    seq = bench.seq([1, 2, 3, 4, 5])
    assert bench.admit(seq)
    assert bench.compute(seq, 4)
    bench.unfinished(seq)
    assert bench.compute(seq, 5)
    bench.check()
    OTHER_DAMAGE[law](bench)
    with pytest.raises(AssertionError, match="^" + law):
        bench.cache.check([seq.kv for seq in bench.live], locks=bench.locks)


def test_check_l5_sees_a_lock_that_nobody_holds() -> None:
    bench = CacheBench(page_size=2)
    bench.cache.inc_lock_ref(bench.cache.core.root)
    bench.cache.core.root.pins = 0
    with pytest.raises(AssertionError, match=r"^L5"):
        bench.cache.check([])
