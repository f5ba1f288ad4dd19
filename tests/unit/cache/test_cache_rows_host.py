"""The host side of the prefix cache: rows of the fault table that need a second tier, and what the tier may rely on."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.cache_bench import CacheBench
from fixtures.fake_tier import FakeTier
from rootlet.cache.actions import BackUp, LoadBack
from rootlet.cache.events import DEVICE, HOST, AllBlocksCleared, BlockRemoved, BlockStored
from rootlet.cache.key import pack
from rootlet.cache.registry import build_cache
from rootlet.cache.types import RadixKey
from rootlet.config.schema import CacheArgs
from rootlet.core.step import Capacity
from rootlet.core.types import Namespace


def host_bench(*, pages: int = 32, hits: int = 1, min_load_len: int = 1, window: int = 0, states: int = 0, **rest: object) -> CacheBench:
    """Pages of 2 tokens. `pages`, `window`, `states`: sizes of the host pools."""
    units = {"full": pages} | ({"swa": window} if window else {}) | ({"mamba": states} if states else {})
    parts = {**({"window": (3, 40)} if window else {}), **({"states": (2, 20)} if states else {})}
    tier = FakeTier(units, write_through_hits=hits, min_load_len=min_load_len)
    return CacheBench(page_size=2, tier=tier, **parts, **rest)  # type: ignore[arg-type]


def key(tokens: list[int]) -> RadixKey:
    return RadixKey(Namespace(), pack(tokens))


def tiers(bench: CacheBench) -> dict[tuple[int, ...], str]:
    """Path -> D, H or both."""
    return {path: "D" * (node.full_pages is not None) + "H" * (node.host is not None) for _, _, path, node in bench.spans()}


def squeeze(bench: CacheBench) -> None:
    """Everything that is not locked leaves the device."""
    assert bench.cache.ensure_pages(bench.cache.available_pages)
    bench.check()


def both(bench: CacheBench, *prompts: list[int]) -> None:
    for prompt in prompts:
        bench.serve(prompt)
        bench.settle()
    bench.check()


# ---- rows ------------------------------------------------------------------------------------------------------------------------------------


def test_row_13_a_flush_gives_every_host_page_back() -> None:
    bench = host_bench(window=20, states=9, events=True)
    both(bench, [1, 2, 3, 4], [1, 2, 7, 7, 7, 7])
    squeeze(bench)
    assert "H" in tiers(bench).values()
    bench.hear()
    assert bench.cache.flush()
    assert {name: pool.num_free for name, pool in bench.tier.pools.items()} == {"full": 32, "swa": 20, "mamba": 9}
    assert bench.cache.keeper.recorder.take().events == (AllBlocksCleared(),)


@pytest.mark.parametrize("what", ["copy", "lock"])
def test_row_13_a_flush_is_refused_while_a_copy_or_a_host_lock_is_out(what: str) -> None:
    bench = host_bench()
    bench.serve([1, 2, 3, 4])
    if what == "lock":
        bench.settle()
        bench.host_locks.append(bench.host.lock(bench.spans()[0][3]))
    assert not bench.cache.flush()
    bench.check()
    bench.settle()
    for lock in bench.host_locks:
        bench.host.unlock(lock)
    bench.host_locks.clear()
    assert bench.cache.flush()


def test_row_27_a_split_copies_what_the_host_side_keeps_on_a_node() -> None:
    """The upper part of a copy in flight that is split must be as safe as the lower one."""
    bench = host_bench()
    both(bench, [1, 2, 3, 4, 5, 6])
    squeeze(bench)
    assert bench.load_back([1, 2, 3, 4, 5, 6]) is not None
    bench.cache.match_prefix(key([1, 2]))
    upper, lower = sorted((node for *_, node in bench.spans()), key=lambda node: node.end)
    assert (upper.end, upper.host_refs, upper.load_op) == (2, 1, lower.load_op)
    assert (upper.host_children, upper.device_children, lower.host_refs) == (1, 0, 1)
    assert not bench.host.ensure("full", 32)
    bench.check()
    bench.settle()
    bench.check()
    assert bench.probe([1, 2, 3, 4, 5, 6]) == 6


@pytest.mark.parametrize("waits", [True, False])
def test_row_44_pages_that_a_host_only_node_takes_over_are_not_freed_as_duplicates(waits: bool) -> None:
    bench = host_bench()
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    seq = bench.run([1, 2, 3, 4, 5])
    own = bench.row_pages(seq)[:2]
    if waits:
        bench.unfinished(seq)
        bench.check()
        assert bench.row_pages(seq)[:2] == own
    bench.finish(seq)
    bench.check()
    node = next(node for *_, path, node in bench.spans() if path == (1, 2, 3, 4))
    assert node.full_pages.tolist() == own
    assert not set(own) & set(bench.cache.allocator.free_pages().tolist())
    assert bench.cache.stats()["adopted_pages"] == 4


def test_row_44_a_load_that_comes_too_late_gives_its_pages_back() -> None:
    bench = host_bench()
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    op = bench.load_back([1, 2, 3, 4])
    free = bench.cache.free_pages
    bench.serve([1, 2, 3, 4])
    assert bench.cache.free_pages == free - 2
    bench.acknowledge(op)
    bench.check()
    assert bench.cache.free_pages == free
    assert bench.cache.keeper.ledger("full").in_flight == 0


@pytest.mark.parametrize("ok", [True, False])
def test_row_47_both_parts_of_a_node_that_was_split_under_its_backup_are_backed_up(ok: bool) -> None:
    bench = host_bench(states=9)
    bench.serve([1, 2, 3, 4, 5, 6])
    bench.cache.match_prefix(key([1, 2, 9, 9]))
    assert [node.backup_op for *_, node in bench.spans()] == [1, 1]
    bench.check()
    bench.acknowledge(1, ok=ok)
    bench.check()
    assert tiers(bench) == dict.fromkeys([(1, 2), (1, 2, 3, 4, 5, 6)], "DH" if ok else "D")
    upper, lower = sorted((node for *_, node in bench.spans()), key=lambda node: node.end)
    assert (upper.backup_op, lower.backup_op) == (None, None)
    assert not ok or (list(upper.host), list(lower.host)) == (["full"], ["full", "mamba"])


def test_row_59_pages_of_a_copy_in_flight_are_nobodys_until_it_is_acknowledged() -> None:
    bench = host_bench(num_pages=4)
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    op = bench.load_back([1, 2, 3, 4])
    assert bench.cache.available_pages == 2
    assert bench.cache.alloc_pages(3) is None
    assert bench.cache.keeper.ledger("full").in_flight == 2
    bench.acknowledge(op, ok=False)
    assert bench.cache.available_pages == 4


# ---- device -> host --------------------------------------------------------------------------------------------------------------------------


def test_without_a_tier_there_is_no_host_side() -> None:
    bench = CacheBench(page_size=2)
    bench.serve([1, 2, 3, 4])
    assert bench.cache.host is None
    assert bench.cache.core.host is None
    found = bench.cache.match_prefix(key([1, 2, 3, 4]))
    assert (found.host_hit_length, found.best_match_node) == (0, None)
    assert not any(name.startswith(("host", "copies")) for name in bench.cache.stats())


@pytest.mark.parametrize(("hits", "started"), [(0, [0, 0, 0]), (1, [2, 2, 2]), (2, [0, 2, 2])])
def test_a_node_is_backed_up_at_the_use_that_the_tier_names(hits: int, started: list[int]) -> None:
    bench = host_bench(hits=hits)
    counts = []
    for _ in range(3):
        bench.serve([1, 2, 3, 4])
        bench.settle()
        counts.append(sum(len(copy.copies["full"].host) for copy in bench.tier.log))
    assert counts == started


def test_parents_are_backed_up_before_their_children_and_the_device_keeps_both_until_then() -> None:
    bench = host_bench(hits=2)
    bench.serve([1, 2])
    bench.serve([1, 2, 3, 4])
    bench.serve([1, 2, 3, 4])
    copies = [copy.copies["full"].device.tolist() for copy in bench.tier.log]
    by_path = {path: node.full_pages.tolist() for _, _, path, node in bench.spans()}
    assert copies == [by_path[1, 2], by_path[1, 2, 3, 4]]
    assert all(isinstance(copy, BackUp) for copy in bench.tier.log)
    assert (bench.cache.protected_pages, bench.cache.evictable_pages) == (2, 0)
    bench.settle()
    assert (bench.cache.protected_pages, bench.cache.evictable_pages) == (0, 2)
    assert bench.cache.stats()["backed_up_pages"] == 2


def test_a_copy_below_one_that_failed_is_dropped() -> None:
    bench = host_bench()
    bench.serve([1, 2])
    bench.serve([1, 2, 3, 4])
    parent, child = sorted(bench.tier.started)
    bench.acknowledge(parent, ok=False)
    bench.acknowledge(child, ok=True)
    bench.check()
    assert set(tiers(bench).values()) == {"D"}
    assert bench.tier.pools["full"].num_free == 32
    bench.serve([1, 2, 3, 4])  # the next use tries again
    bench.settle()
    assert set(tiers(bench).values()) == {"DH"}


def test_a_copy_that_ends_before_its_parents_is_dropped_and_made_again() -> None:
    bench = host_bench()
    bench.serve([1, 2])
    bench.serve([1, 2, 3, 4])
    parent, child = sorted(bench.tier.started)
    bench.acknowledge(child)
    bench.acknowledge(parent)
    bench.check()
    assert sorted(tiers(bench).values()) == ["D", "DH"]
    bench.serve([1, 2, 3, 4])
    bench.settle()
    assert set(tiers(bench).values()) == {"DH"}


def test_a_state_that_comes_later_is_backed_up_alone() -> None:
    bench = host_bench(states=9)
    both(bench, [1, 2, 3, 4])
    bench.cache.match_prefix(key([1, 2, 9, 9]))  # splits: the upper part has no state
    seq = bench.seq([1, 2, 9, 9, 9])
    assert bench.admit(seq)
    assert seq.branch_at == 2
    assert bench.compute(seq, 2)
    bench.unfinished(seq)
    assert list(bench.tier.log[-1].copies) == ["mamba"]
    bench.settle()
    bench.check()
    node = next(node for *_, path, node in bench.spans() if path == (1, 2))
    assert set(node.host) == {"full", "mamba"}


def test_a_second_acknowledgement_is_refused() -> None:
    bench = host_bench()
    bench.serve([1, 2])
    op = min(bench.tier.started)
    bench.acknowledge(op)
    with pytest.raises(AssertionError, match=r"^C6: copy 1 is not in flight"):
        bench.host.acknowledge(op, ok=True)


# ---- host -> device --------------------------------------------------------------------------------------------------------------------------


def test_what_left_the_device_is_found_on_the_host_and_comes_back() -> None:
    bench = host_bench(window=20, states=9, events=True)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    both(bench, prompt)
    squeeze(bench)
    assert bench.cache.stats()["demoted_pages"] == 4
    found = bench.cache.match_prefix(key([*prompt, 9]))
    assert (found.device_prefix_len, found.host_hit_length, found.best_match_node.end) == (0, 8, 8)
    assert bench.probe(prompt) == 0
    bench.hear()
    op = bench.load_back([*prompt, 9])
    assert bench.cache.match_prefix(key(prompt)).device_prefix_len == 0, "not before it is acknowledged"
    bench.acknowledge(op)
    bench.check()
    found = bench.cache.match_prefix(key([*prompt, 9]))
    assert (found.device_prefix_len, found.host_hit_length, len(found.pages)) == (8, 0, 4)
    assert bench.cache.stats()["loaded_back_pages"] == 4
    assert bench.cache.stats()["hit_tokens"]["host"]["all"] == 8 + 8 + 8
    assert set(bench.tier.log[-1].copies) == {"full", "swa", "mamba"}
    assert isinstance(bench.tier.log[-1], LoadBack)
    assert len(bench.tier.log[-1].copies["swa"].host) == 2, "only the last window comes back"


@pytest.mark.parametrize("lost", ["swa", "mamba"])
def test_only_what_is_missing_comes_back(lost: str) -> None:
    """The full KV is on the device, its window or its state was evicted there: no hit yet, though the host has it."""
    bench = host_bench(window=20) if lost == "swa" else host_bench(states=9)
    both(bench, [1, 2, 3, 4])
    lock = bench.cache.inc_lock_ref(next(node for *_, path, node in bench.spans() if path == (1, 2, 3, 4)))
    bench.cache.core.others[0].let_go(lock)
    bench.locks.append(lock)
    assert bench.cache.keeper.ensure(lost, bench.cache.keeper.pools[lost].num_pages)
    bench.check()
    assert bench.probe([1, 2, 3, 4]) == 0
    found = bench.cache.match_prefix(key([1, 2, 3, 4]))
    assert (found.device_prefix_len, found.host_hit_length) == (0, 4)
    bench.acknowledge(bench.load_back([1, 2, 3, 4]))
    bench.check()
    assert list(bench.tier.log[-1].copies) == [lost]
    assert bench.probe([1, 2, 3, 4]) == 4


def test_of_a_window_that_is_half_on_the_device_the_other_half_comes_back() -> None:
    bench = host_bench(window=20)
    both(bench, [1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    assert bench.cache.ensure_pages(bench.cache.free_pages + 1)
    assert tiers(bench) == {(1, 2, 3, 4): "DH", (1, 2, 3, 4, 5, 6): "H"}
    bench.acknowledge(bench.load_back([1, 2, 3, 4, 5, 6]))
    bench.check()
    assert {name: len(copy.host) for name, copy in bench.tier.log[-1].copies.items()} == {"full": 1, "swa": 1}
    assert bench.probe([1, 2, 3, 4, 5, 6]) == 6


@pytest.mark.parametrize(("least", "loads"), [(4, True), (5, False)])
def test_a_host_hit_below_the_least_length_is_computed_anew(least: int, loads: bool) -> None:
    bench = host_bench(min_load_len=least)
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    assert (bench.load_back([1, 2, 3, 4]) is not None) == loads
    bench.check()


def test_a_load_that_finds_no_room_is_a_normal_outcome() -> None:
    bench = host_bench(num_pages=4)
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    seq = bench.run([9, 9, 9, 9, 9, 9])
    assert bench.load_back([1, 2, 3, 4]) is None
    assert bench.cache.stats()["copies_skipped_no_device_room"] == 1
    bench.check()
    bench.release(seq)
    assert bench.load_back([1, 2, 3, 4]) is not None


def test_two_requests_wait_for_one_load() -> None:
    bench = host_bench()
    both(bench, [1, 2, 3, 4, 5, 6])
    squeeze(bench)
    op = bench.load_back([1, 2, 3, 4, 5, 6])
    assert bench.load_back([1, 2, 3, 4]) == op
    assert len(bench.tier.started) == 1
    bench.check()


def test_a_failed_load_leaves_the_host_copy_and_is_tried_again() -> None:
    bench = host_bench(window=20, states=9)
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    before = [pool.num_free for pool in bench.cache.keeper.pools.values()]
    bench.acknowledge(bench.load_back([1, 2, 3, 4]), ok=False)
    bench.check()
    assert [pool.num_free for pool in bench.cache.keeper.pools.values()] == before
    bench.acknowledge(bench.load_back([1, 2, 3, 4]))
    assert bench.probe([1, 2, 3, 4]) == 4


def test_a_match_whose_host_copy_went_meanwhile_is_computed_anew() -> None:
    bench = host_bench()
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    found = bench.cache.match_prefix(key([1, 2, 3, 4]))
    assert bench.host.ensure("full", 32)
    assert bench.host.load_back(found) is None


# ---- room on the host ------------------------------------------------------------------------------------------------------------------------


def test_the_copy_used_longest_ago_goes_first_children_before_parents() -> None:
    bench = host_bench(pages=4)
    both(bench, [1, 2, 3, 4], [5, 6])
    bench.cache.match_prefix(key([1, 2, 3, 4]))
    both(bench, [7, 8, 9, 9])
    assert tiers(bench) == {(1, 2, 3, 4): "DH", (5, 6): "D", (7, 8, 9, 9): "DH"}
    assert bench.host.evictions == {("full", "host_pressure"): 1}


def test_a_use_of_what_lies_below_keeps_a_copy_young() -> None:
    """The child's copy went while the child stays on the device: its parent was used with it, after the other one."""
    bench = host_bench(pages=3)
    both(bench, [1, 2], [1, 2, 3, 4], [5, 6])
    bench.cache.match_prefix(key([1, 2, 3, 4]))
    lock = bench.host.lock(next(node for *_, path, node in bench.spans() if path == (5, 6)))
    assert bench.host.ensure("full", 1)
    bench.host.unlock(lock)
    assert tiers(bench) == {(1, 2): "DH", (1, 2, 3, 4): "D", (5, 6): "DH"}
    assert bench.host.ensure("full", 2)
    assert tiers(bench) == {(1, 2): "DH", (1, 2, 3, 4): "D", (5, 6): "D"}
    bench.check()


def test_a_copy_makes_no_room_of_the_one_it_hangs_on() -> None:
    bench = host_bench(pages=2)
    both(bench, [1, 2])
    bench.serve([1, 2, 3, 4, 5, 6])
    assert len(bench.tier.log) == 1
    assert tiers(bench) == {(1, 2): "DH", (1, 2, 3, 4, 5, 6): "D"}


def test_a_long_copy_is_trimmed_from_its_tail() -> None:
    bench = host_bench(pages=4)
    both(bench, [1, 2, 3, 4, 5, 6, 7, 8])
    assert bench.host.ensure("full", 1)
    bench.check()
    assert tiers(bench) == {(1, 2, 3, 4, 5, 6): "DH", (1, 2, 3, 4, 5, 6, 7, 8): "D"}


def test_a_lost_host_window_of_a_node_on_the_device_takes_nothing_along() -> None:
    bench = host_bench(window=20)
    both(bench, [1, 2, 3, 4])
    assert bench.host.ensure("swa", 20)
    bench.check()
    assert tiers(bench) == {(1, 2, 3, 4): "DH"}


def test_a_copy_larger_than_the_pool_evicts_nothing() -> None:
    bench = host_bench(pages=2)
    both(bench, [1, 2, 3, 4], [7, 7, 7, 7, 7, 7])
    assert tiers(bench) == {(1, 2, 3, 4): "DH", (7, 7, 7, 7, 7, 7): "D"}
    assert bench.cache.stats()["copies_skipped_no_host_room"] == 1


def test_a_locked_copy_and_all_above_it_stay() -> None:
    bench = host_bench(pages=3)
    both(bench, [1, 2], [1, 2, 3, 4], [5, 6])
    squeeze(bench)
    bench.host_locks.append(bench.host.lock(next(node for *_, path, node in bench.spans() if path == (1, 2, 3, 4))))
    assert not bench.host.ensure("full", 2)
    assert tiers(bench) == {(1, 2): "H", (1, 2, 3, 4): "H"}
    bench.check()
    lock = bench.host_locks.pop()
    bench.host.unlock(lock)
    with pytest.raises(AssertionError, match=r"^L1: .* is released twice"):
        bench.host.unlock(lock)
    assert bench.host.ensure("full", 3)


def test_a_lost_host_window_ends_matches_there_and_a_leaf_goes_with_it() -> None:
    bench = host_bench(window=20)
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    assert bench.host.ensure("swa", 20)
    bench.check()
    assert tiers(bench).get((1, 2, 3, 4)) is None
    assert bench.cache.match_prefix(key([1, 2, 3, 4])).host_hit_length == 0


def test_events_name_the_tier() -> None:
    bench = host_bench(events=True)
    bench.serve([1, 2, 3, 4])
    assert [event.medium for event in bench.hear()] == [DEVICE]
    bench.settle()
    (stored,) = bench.hear()
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.token_ids) == (HOST, (1, 2, 3, 4))
    squeeze(bench)
    bench.acknowledge(bench.load_back([1, 2, 3, 4]))
    (back,) = bench.hear()
    assert (back.medium, back.block_hashes) == (DEVICE, stored.block_hashes)
    assert bench.host.ensure("full", 32)
    (gone,) = bench.hear()
    assert gone == BlockRemoved(stored.block_hashes, HOST)


def test_what_a_request_brings_back_by_computing_it_is_told() -> None:
    bench = host_bench(events=True)
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    bench.hear()
    bench.serve([1, 2, 3, 4])
    assert [(event.medium, event.token_ids) for event in bench.hear()] == [(DEVICE, (1, 2, 3, 4))]


def test_pretty_shows_what_is_where() -> None:
    bench = host_bench(states=9)
    both(bench, [1, 2, 3, 4])
    assert bench.cache.pretty().splitlines()[2:] == ["+- [0, 4) tokens 1 2 3 4 pages 1 2 locks 0 hits 1 mamba 1 host full 2 host mamba 1"]
    squeeze(bench)
    assert bench.cache.pretty().splitlines()[2:] == ["+- [0, 4) tokens 1 2 3 4 pages none locks 0 hits 1 mamba 0 host full 2 host mamba 1"]


def test_build_cache_takes_a_tier_that_has_a_pool_for_every_component() -> None:
    capacity = Capacity(num_pages=9, page_size=2, max_rows=2, max_context_len=18, max_step_tokens=8, vocab_size=9)
    assert build_cache(CacheArgs(), capacity, tier=FakeTier({"full": 4})).host is not None
    with pytest.raises(AssertionError, match=r"^C6: host pools \['swa'\] for components \['full'\]"):
        build_cache(CacheArgs(), capacity, tier=FakeTier({"swa": 4}))


# ---- `check` can see -------------------------------------------------------------------------------------------------------------------------

HOST_DAMAGE = {
    "C6: .1 pages .deficit: leak": lambda b, node: b.tier.pools["full"].alloc(1),
    "C6: host units": lambda b, node: node.host.update(full=node.host["full"][[0, 0]]),
    "C6: .* are on nodes": lambda b, node: b.host.tree.held.update(full=3),
    "L3: .* host locks": lambda b, node: setattr(node, "host_refs", 3),
    "L2: .* host locks": lambda b, node: setattr(b.host.tree, "num_locks", 3),
    "S5: .* on the host": lambda b, node: setattr(node, "host_children", 3),
    "S5: .* on the device": lambda b, node: setattr(node, "device_children", 3),
    "S6: .* alone": lambda b, node: node.host.update(mamba=node.host.pop("full")[:1]),
    "S3: .* host units": lambda b, node: node.host.update(full=np.concatenate([node.host["full"]] * 2)),
    "S4: marks": lambda b, node: setattr(node, "load_op", 9),
    "S4: .* does not know of copy 2": lambda b, node: b.load_back([1, 2, 3, 4]) and setattr(node, "load_op", None),
    "E3": lambda b, node: b.host.tree._heaps["full"]._entries.clear(),
}


@pytest.mark.parametrize("law", HOST_DAMAGE)
def test_check_names_the_law_of_the_host_side_that_was_broken(law: str) -> None:
    bench = host_bench(states=9)
    both(bench, [1, 2, 3, 4])
    squeeze(bench)
    HOST_DAMAGE[law](bench, bench.spans()[0][3])
    with pytest.raises(AssertionError, match="^" + law):
        bench.cache.check([], locks=bench.locks)
