"""What goes wrong in prefix caches in practice, one smallest example each: row NN of the design's table of field bugs (Full attention).

Rows about KV events, HTTP, windows, states, host tiers and speculation belong to the rooms that have them.
"""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from fixtures.cache_bench import PLAIN, CacheBench
from rootlet.cache.key import pack
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import RadixKey, ReqKvInfo
from rootlet.core.types import Namespace

HOT = [50, 51, 52, 53]


def key(tokens: list[int], limit: int | None = None) -> RadixKey:
    return RadixKey(PLAIN, pack(tokens), limit)


def nodes(bench: CacheBench) -> list[tuple[int, ...]]:
    """Whole paths of all nodes, sorted."""
    return sorted(path for _, _, path, _ in bench.spans())


def evict(bench: CacheBench, pages: int) -> None:
    assert bench.cache.ensure_pages(bench.cache.free_pages + pages)


# ---- who owns which page ---------------------------------------------------------------------------------------------------------------------


def test_row_01_a_row_is_repointed_before_its_duplicates_are_freed() -> None:
    bench = CacheBench(page_size=2)
    one, two = bench.run([1, 2, 3, 4]), bench.run([1, 2, 3, 4])
    own = bench.row_pages(two)
    bench.unfinished(one)
    bench.unfinished(two)
    assert bench.row_pages(two) == bench.row_pages(one) != own
    bench.run([9, 9, 9, 9])  # takes the freed duplicates and writes to them
    bench.check()
    assert bench.device_table[two.kv.row, :2].tolist() == bench.row_pages(one)


def test_row_02_a_lock_counts_its_anchor_and_all_above() -> None:
    bench = CacheBench(page_size=1)
    bench.serve([1, 2])
    bench.serve([1, 2, 3, 4])
    lock = bench.cache.inc_lock_ref(bench.cache.match_prefix(key([1, 2, 3, 4])).last_device_node)
    assert (bench.cache.evictable_pages, bench.cache.protected_pages) == (0, 4)
    assert not bench.cache.ensure_pages(bench.cache.free_pages + 1)
    bench.cache.dec_lock_ref(lock)
    assert (bench.cache.evictable_pages, bench.cache.protected_pages) == (4, 0)


def test_row_03_a_split_refreshes_the_matched_part_only() -> None:
    bench = CacheBench(page_size=1)
    bench.serve([1, 2, 3, 4, 5, 6, 7, 8])
    bench.serve(HOT)
    bench.cache.match_prefix(key([1, 2, 3, 4]))
    evict(bench, 4)
    assert nodes(bench) == [(1, 2, 3, 4), tuple(HOT)]


def test_row_04_a_key_shorter_than_a_page_matches_nothing_and_leaves_nothing() -> None:
    bench = CacheBench(page_size=4)
    bench.serve([1, 2, 3, 4])
    found = bench.cache.match_prefix(key([1, 2, 3]))
    assert (found.device_prefix_len, len(found.pages), bench.probe([1, 2, 3])) == (0, 0, 0)
    bench.serve([7, 8, 9])
    assert nodes(bench) == [(1, 2, 3, 4)]
    evict(bench, 1)
    assert bench.cache.stats()["free_pages"] == bench.cache.allocator.num_pages
    assert bench.cache.stats()["nodes"] == bench.cache.stats()["namespaces"] == 0


def test_row_05_a_prompt_below_the_page_size_runs_and_ends_without_a_trace() -> None:
    bench = CacheBench(page_size=32)
    seq = bench.run(list(range(29)))
    bench.unfinished(seq)
    assert (seq.kv.cache_protected_len, bench.cache.core.num_locks) == (0, 1)
    bench.check()
    bench.finish(seq)
    bench.check()
    assert (bench.cache.free_pages, bench.cache.core.num_locks) == (64, 0)


@pytest.mark.parametrize("owned", [4, 5, 7, 8, 12, 13])
def test_row_06_adjacent_free_ranges_never_share_a_page(owned: int) -> None:
    bench = CacheBench(page_size=8)
    seq = bench.run(list(range(13)))
    bench.finish(seq, owned=owned)
    bench.check()
    assert bench.cache.free_pages + bench.cache.evictable_pages == 64
    assert bench.cache.evictable_pages == owned // 8


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_rows_07_and_08_a_slot_allocated_for_the_next_step_is_freed_once(page_size: int) -> None:
    bench = CacheBench(page_size=page_size)
    seq = bench.run([1, 2, 3, 4])
    seq.tokens.append(5)
    assert bench.reserve(seq, 5)  # the overlapped step's slot; the request ended at 4
    bench.finish(seq, owned=4)
    bench.check()
    assert bench.cache.available_pages == 64
    assert bench.cache.evictable_pages == 4 // page_size


def test_row_09_what_was_reserved_beyond_the_committed_length_comes_back_in_whole_pages() -> None:
    bench = CacheBench(page_size=4)
    seq = bench.run([1, 2, 3, 4, 5, 6])
    assert bench.reserve(seq, 9)
    assert bench.cache.free_pages == 61
    bench.release(seq)
    assert bench.cache.free_pages == 64
    bench.check()


def test_row_10_a_second_release_is_refused_and_changes_nothing() -> None:
    bench = CacheBench(page_size=2)
    seq, other = bench.run([1, 2, 3]), bench.run([7, 8, 9])
    bench.finish(seq)
    for again in (lambda: bench.cache.release(seq.kv), lambda: bench.cache.cache_finished_req(seq.kv, bench.key(seq))):
        with pytest.raises(AssertionError, match="R5"):
            again()
    assert seq.kv == ReqKvInfo()
    assert bench.live == [other]
    bench.check()


def test_row_11_a_pool_too_small_for_the_last_request_says_no_and_evicts_nothing() -> None:
    bench = CacheBench(page_size=1, num_pages=4)
    bench.serve([9])
    seq = bench.run([1, 2])
    assert bench.cache.available_pages == 2
    assert bench.cache.alloc_pages(3) is None
    assert bench.probe([9]) == 1
    bench.release(seq)
    bench.check()


def test_row_12_a_flush_under_a_lock_is_refused_and_an_old_lock_is_void_after_one() -> None:
    bench = CacheBench(page_size=1)
    bench.serve([1, 2, 3])
    lock = bench.cache.inc_lock_ref(bench.cache.match_prefix(key([1, 2])).last_device_node)
    assert not bench.cache.flush()
    assert (bench.probe([1, 2, 3]), bench.cache.epoch) == (3, 0)
    bench.cache.dec_lock_ref(lock)
    assert bench.cache.flush()
    assert (bench.probe([1, 2, 3]), bench.cache.epoch, bench.cache.free_pages) == (0, 1, 64)
    lock.released = False
    with pytest.raises(AssertionError, match="L1"):
        bench.cache.dec_lock_ref(lock)
    with pytest.raises(AssertionError, match="L1"):
        bench.cache.inc_lock_ref(lock.node)


def test_row_12_a_flush_while_a_request_matched_nothing_is_refused_too() -> None:
    bench = CacheBench(page_size=4)
    seq = bench.run([1, 2])
    assert not bench.cache.flush()
    bench.release(seq)
    assert bench.cache.flush()


def test_row_14_pages_that_entered_the_tree_under_one_key_are_refused_under_another() -> None:
    bench = CacheBench(page_size=1)
    seq = bench.run([1, 2, 3])
    bench.unfinished(seq)
    seq.tokens[1] = 9
    with pytest.raises(AssertionError, match="R2"):
        bench.unfinished(seq)


def test_row_14_two_requests_cannot_give_the_tree_the_same_pages() -> None:
    bench = CacheBench(page_size=1)
    one, two = bench.run([1, 2, 3]), bench.run([4, 5, 6])
    bench.rows.write(two.kv.row, 0, bench.rows.pages(one.kv.row, 0, 3))
    bench.unfinished(one)
    with pytest.raises(AssertionError, match="C7"):
        bench.unfinished(two)


# ---- eviction --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "survivor"), [("lfu", (1,)), ("slru", (1,)), ("lru", (2,))])
def test_row_15_hits_are_counted(policy: str, survivor: tuple[int, ...]) -> None:
    bench = CacheBench(page_size=1, policy=policy)
    for tokens in ([1], [1], [1], [2]):
        bench.serve(tokens)
    evict(bench, 1)
    assert nodes(bench) == [survivor]


def test_row_15_a_request_counts_a_node_once_however_often_it_shares() -> None:
    bench = CacheBench(page_size=1)
    seq = bench.run([1, 2, 3])
    for _ in range(3):
        bench.unfinished(seq)
    bench.finish(seq, prompt_len=2)
    assert {node.hits for *_, node in bench.spans()} == {1}


def test_row_16_mru_notices_a_touch_after_the_heap_was_built() -> None:
    bench = CacheBench(page_size=1, policy="mru")
    for tokens in ([1], [2], [3]):
        bench.serve(tokens)
    bench.cache.match_prefix(key([1]))
    evict(bench, 1)
    assert nodes(bench) == [(2,), (3,)]


def test_row_17_equal_instances_evict_equal_pages() -> None:
    def play(seed: int) -> tuple[list[int], str]:
        rng = np.random.default_rng(seed)
        bench = CacheBench(page_size=2, num_pages=20)
        for _ in range(60):
            bench.serve(rng.integers(0, 2, size=rng.integers(1, 16)).tolist())
        return bench.cache.allocator.free_pages().tolist(), bench.cache.pretty()

    assert play(5) == play(5)


def test_row_18_a_victim_costs_the_same_with_50k_leaves() -> None:
    """Beside 500 leaves, in the same moments: the best of each, so that neither the machine nor what disturbs it matters."""
    rounds, counts = 200, (500, 50_000)
    few, many = (_leaves(count) for count in counts)
    best_s = [math.inf, math.inf]
    for _ in range(rounds):
        for i, bench in enumerate((few, many)):
            best_s[i] = min(best_s[i], _seconds(lambda bench=bench: evict(bench, 1)))
    assert best_s[1] < 10 * best_s[0]  # looking at each leaf would take a hundred times as long
    for bench in (few, many):
        assert bench.probe([rounds - 1]) == 0
        assert bench.probe([rounds]) == 1


def _leaves(count: int) -> CacheBench:
    bench = CacheBench(page_size=1, num_pages=count)
    core, pages = bench.cache.core, bench.cache.allocator.alloc(count)
    for token in range(count):
        core.insert(key([token]), pages[token : token + 1], protected=core.root, inserted_len=0, priority=0)
    return bench


def _seconds(work: object) -> float:
    """Of the processor: what others do on the machine does not count."""
    begin_s = time.thread_time()
    work()  # type: ignore[operator]
    return time.thread_time() - begin_s


# ---- namespaces ------------------------------------------------------------------------------------------------------------------------------


def test_row_22_namespaces_that_concatenate_alike_share_nothing() -> None:
    spaces = [
        Namespace(lora_id="x"),
        Namespace(extra_key="x"),
        Namespace(cache_salt="x"),
        Namespace("a", "bc"),
        Namespace("ab", "c"),
        Namespace("a", None, "bc"),
        Namespace(),
    ]
    bench = CacheBench(page_size=1)
    for i, space in enumerate(spaces):
        assert [bench.probe([1, 2], other) for other in spaces] == [2] * i + [0] * (len(spaces) - i)
        bench.serve([1, 2], space)
    bench.check()
    assert bench.probe([1, 2], Namespace("", "", "")) == 2


def test_row_22_a_namespace_leaves_nothing_behind() -> None:
    bench = CacheBench(page_size=1, num_pages=4)
    for i in range(50):
        bench.serve([1, 2], Namespace(cache_salt=str(i)))
        assert bench.cache.match_prefix(RadixKey(Namespace(cache_salt="never used"), pack([1]))).device_prefix_len == 0
    assert bench.cache.stats()["namespaces"] == 2
    evict(bench, 4 - bench.cache.free_pages)
    assert bench.cache.stats()["namespaces"] == 0


# ---- structure -------------------------------------------------------------------------------------------------------------------------------

SPLIT_RULES = {
    "key": "divide",
    "full_pages": "divide",
    "start": "upper keeps, lower = cut",
    "end": "upper = cut, lower keeps",
    "tick": "copy",
    "created": "copy",
    "hits": "copy",
    "priority": "copy",
    "pins": "stay below",
    "queued": "stay below",
    "children": "stay below",
    "parent": "chain",
    "active_children": "1 if the lower part is active",
    "alive": "both live",
    "namespace": "none: roots are never split",
    "seq": "fresh",
    "hashes": "divide",
    "swa_pages": "divide",
    "swa_refs": "copy",
    "swa_tick": "copy",
    "state_slot": "stay below",
    "state_refs": "stay below",
    "state_tick": "copy",
    "device_children": "1 if the lower part is on the device",
    "host": "divide; a state stays below",
    "host_children": "1 if the lower part is on the host",
    "host_refs": "copy",
    "backup_op": "copy",
    "load_op": "copy",
}


@pytest.mark.parametrize("locked", [False, True])
def test_row_27_every_field_of_a_node_has_a_rule_for_splits(locked: bool) -> None:
    assert set(SPLIT_RULES) == set(UnifiedTreeNode.__slots__)
    bench = CacheBench(page_size=2)
    bench.serve([1, 2, 3, 4, 5, 6], priority=3)
    bench.serve([1, 2, 3, 4, 5, 6, 7, 8])
    lower = bench.cache.match_prefix(key([1, 2, 3, 4, 5, 6])).last_device_node
    if locked:
        bench.locks.append(bench.cache.inc_lock_ref(lower))
    above, old = lower.parent, {field: getattr(lower, field) for field in UnifiedTreeNode.__slots__}
    upper = bench.cache.core.split(lower, 2)
    assert (upper.key, lower.key) == (pack([1, 2]), pack([3, 4, 5, 6]))
    assert [*upper.full_pages, *lower.full_pages] == old["full_pages"].tolist()
    assert (upper.start, upper.end, lower.start, lower.end) == (0, 2, 2, 6)
    for field in ("tick", "created", "hits", "priority"):
        assert getattr(upper, field) == getattr(lower, field) == old[field]
    assert upper.hits > 1
    assert (upper.priority, upper.tick > upper.created) == (3, True)
    assert (upper.pins, lower.pins, lower.queued, upper.queued) == (0, int(locked), old["queued"], False)
    assert (upper.children, lower.children) == ({pack([3, 4]): lower}, old["children"])
    assert (upper.parent, lower.parent, above.children) == (above, upper, {pack([1, 2]): upper})
    assert (upper.active_children, lower.active_children) == (int(locked), old["active_children"])
    assert (upper.alive, lower.alive, upper.namespace) == (True, True, None)
    assert (lower.seq, upper.seq > lower.seq) == (old["seq"], True)
    bench.check()


def test_row_42_progress_does_not_depend_on_insertion() -> None:
    bench = CacheBench(page_size=4, enabled=False)
    seq = bench.seq(list(range(12)))
    assert bench.admit(seq)
    for end in (4, 8, 12):
        assert bench.compute(seq, end)
        bench.unfinished(seq)
        assert (seq.kv.kv_allocated_len, seq.kv.kv_committed_len, bench.cache.free_pages) == (end, end, 64 - end // 4)
    bench.check()
    bench.finish(seq)
    bench.check()
    assert (bench.cache.free_pages, bench.probe(list(range(12)))) == (64, 0)


def test_row_43_the_key_ends_at_the_stop_and_the_next_turn_hits_up_to_it() -> None:
    bench = CacheBench(page_size=1)
    seq = bench.run([1, 2, 3])
    seq.tokens += [11, 12, 13, 14, 15, 16, 17, 18]  # eight drafts were accepted, the fifth was the stop
    assert bench.compute(seq, 11)
    bench.finish(seq, owned=8)
    bench.check()
    assert bench.probe([1, 2, 3, 11, 12, 13, 14, 15, 99]) == 8
    assert bench.probe([1, 2, 3, 11, 12, 13, 14, 15, 16]) == 8


def test_row_45_sharing_twice_with_an_unaligned_tail_is_a_no_op() -> None:
    bench = CacheBench(page_size=4)
    seq = bench.run([1, 2, 3, 4, 5, 6])
    bench.unfinished(seq)
    before = bench.row_pages(seq), bench.cache.free_pages, seq.kv.cache_protected_len, bench.cache.pretty()
    bench.sync()
    bench.unfinished(seq)
    assert (bench.row_pages(seq), bench.cache.free_pages, seq.kv.cache_protected_len, bench.cache.pretty()) == before
    assert bench.rows.take_deltas() == ()
    assert before[2] == 4
    seq.tokens += [7, 8]
    assert bench.compute(seq, 8)  # goes on in its private tail page
    bench.unfinished(seq)
    assert bench.cache.free_pages == 62
    bench.check()


def test_row_46_a_lock_on_part_of_an_edge_survives_a_later_branch() -> None:
    bench = CacheBench(page_size=1)
    bench.serve([1, 2, 3, 4])
    lock = bench.cache.inc_lock_ref(bench.cache.match_prefix(key([1, 2])).last_device_node)
    bench.locks.append(lock)
    bench.serve([1, 2, 9, 9])
    bench.serve([1, 8])  # splits the locked node itself
    bench.check()
    assert bench.cache.protected_pages == 2
    bench.locks.remove(lock)
    bench.cache.dec_lock_ref(lock)
    bench.check()
    assert bench.cache.protected_pages == 0
    with pytest.raises(AssertionError, match="L1"):
        bench.cache.dec_lock_ref(lock)


def test_row_48_a_reused_page_is_not_found_under_its_old_prefix() -> None:
    bench = CacheBench(page_size=2, num_pages=2)
    bench.serve([1, 2, 3, 4])
    bench.serve([5, 6, 7, 8])
    assert (bench.probe([1, 2, 3, 4]), bench.probe([5, 6, 7, 8])) == (0, 4)
    bench.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_row_49_a_wholly_cached_prompt_still_computes_its_last_token(page_size: int) -> None:
    bench = CacheBench(page_size=page_size)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    bench.serve(prompt)
    seq = bench.seq(prompt)
    assert bench.admit(seq)
    assert seq.kv.kv_committed_len == 8 - page_size
    assert bench.compute(seq, 8)
    bench.finish(seq)
    bench.check()
    assert bench.cache.evictable_pages == 8 // page_size


def test_row_50_what_was_matched_and_locked_stays_whatever_happens_in_between() -> None:
    bench = CacheBench(page_size=1, num_pages=8)
    bench.serve([1, 2, 3, 4])
    seq = bench.seq([1, 2, 3, 4, 5])
    assert bench.admit(seq)
    bench.serve([1, 2, 9])  # splits the matched node, takes pages
    evict(bench, 1)
    assert bench.compute(seq, 5)
    bench.check()
    assert seq.kv.cache_protected_len == 4


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_row_51_of_identical_prompts_in_one_step_one_copy_is_kept(order: tuple[int, int]) -> None:
    bench = CacheBench(page_size=2)
    pair = bench.run([1, 2, 3, 4, 5]), bench.run([1, 2, 3, 4, 5])
    assert bench.cache.free_pages == 58
    for i in order:
        bench.unfinished(pair[i])
    assert bench.cache.free_pages == 60  # 2 shared, one private tail each
    bench.check()
    for i in order:
        bench.finish(pair[i])
    bench.check()
    assert (bench.cache.free_pages, bench.cache.evictable_pages) == (62, 2)


def test_row_52_what_is_not_committed_cannot_be_shared() -> None:
    bench = CacheBench(page_size=2)
    seq = bench.seq([1, 2, 3, 4])
    assert bench.admit(seq)
    assert bench.reserve(seq, 4)
    with pytest.raises(AssertionError, match="R1"):
        bench.cache.cache_unfinished_req(seq.kv, bench.key(seq))
    assert bench.probe([1, 2, 3, 4]) == 0


@pytest.mark.parametrize("at", range(8))
def test_row_55_every_token_is_compared_wherever_it_stands(at: int) -> None:
    bench = CacheBench(page_size=2)
    cached = [1, 2, 3, 4, 5, 6, 7, 8]
    bench.serve(cached[:4])
    bench.serve(cached)
    asked = [*cached[:at], 99, *cached[at + 1 :]]
    assert bench.probe(asked) == at // 2 * 2
    bench.serve(asked)
    bench.check()


@pytest.mark.parametrize(("start", "hit"), [(0, 0), (3, 0), (5, 4), (8, 8)])
def test_row_57_a_key_limit_caps_the_match(start: int, hit: int) -> None:
    bench = CacheBench(page_size=4)
    prompt = list(range(12))
    bench.serve(prompt)
    assert bench.cache.probe(key(prompt, start)) == hit
    assert bench.cache.match_prefix(key(prompt, start)).device_prefix_len == hit
    bench.check()


def test_row_57_a_negative_limit_is_an_empty_key() -> None:
    bench = CacheBench(page_size=1)
    bench.serve([1, 2])
    assert bench.cache.probe(key([1, 2], -1)) == 0


def test_row_58_a_chain_of_5000_nodes_needs_no_recursion() -> None:
    depth = 5_000
    bench = CacheBench(page_size=1, num_pages=depth + 8, pages_per_row=depth + 8)
    data, pages = pack(np.zeros(depth, dtype=np.int64)), bench.cache.allocator.alloc(depth)
    core = bench.cache.core
    leaf = core.insert(RadixKey(PLAIN, data), pages, protected=core.root, inserted_len=0, priority=0).node
    for _ in range(depth - 1):
        core.split(leaf, 1)
    assert bench.cache.stats()["nodes"] == depth
    found = bench.cache.match_prefix(RadixKey(PLAIN, data))
    assert found.pages.tolist() == pages.tolist()
    lock = bench.cache.inc_lock_ref(found.last_device_node)
    bench.cache.check([], locks=[lock])
    assert len(bench.cache.pretty(max_nodes=3).splitlines()) == 6
    bench.cache.dec_lock_ref(lock)
    assert bench.cache.flush()
    bench.cache.check([])


def test_row_60_matching_64k_tokens_is_a_few_memcmps() -> None:
    bench = CacheBench(page_size=16, num_pages=5_000, pages_per_row=5_000)
    tokens, core = np.random.default_rng(0).integers(0, 50_000, size=65_536).tolist(), bench.cache.core
    pages = bench.cache.allocator.alloc(65_536 // 16)
    for length in (65_536, 40_000, 9_984):
        core.insert(key(tokens[:length]), pages[: length // 16], protected=core.match(key(tokens[:length])).node, inserted_len=0, priority=0)
    assert core.num_nodes == 3
    long, short = key(tokens), key(tokens[:4_096])
    assert (bench.cache.probe(long), bench.cache.probe(short)) == (65_536, 4_096)
    assert min(_seconds(lambda: bench.cache.probe(long)) for _ in range(20)) < 1e-3
    assert min(_seconds(lambda: [bench.cache.probe(short) for _ in range(128)]) for _ in range(5)) < 5e-3
