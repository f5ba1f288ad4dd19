"""The same work done in two ways must leave the same cache. Letters as in the design's list of metamorphic checks."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.cache_bench import CacheBench
from fixtures.cache_oracle import SORT_KEYS
from fixtures.fake_tier import FakeTier
from rootlet.cache.eviction import POLICIES, LazyHeap
from rootlet.cache.key import pack
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import RadixKey
from rootlet.core.types import Namespace

quick = settings(max_examples=25, deadline=None, database=None, derandomize=True)
prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=2, max_size=10)


PARTS = {
    "full": {},
    "full+swa": {"window": (3, 64)},
    "full+mamba": {"states": (2, 40)},
    "full+swa+mamba": {"window": (3, 64), "states": (2, 40)},
}
every_part = pytest.mark.parametrize("parts", PARTS)


def key(tokens: list[int]) -> RadixKey:
    return RadixKey(Namespace(), pack(tokens))


def tier(parts: str, host: bool, *, windows: int = 9) -> dict[str, FakeTier]:
    """A small host tier for the components of `parts`, or none."""
    sizes = {"full": 12, "swa": windows, "mamba": 3}
    return {"tier": FakeTier({name: sizes[name] for name in parts.split("+")})} if host else {}


def serve(bench: CacheBench, prompt: list[int], *, chunk: int | None = None) -> None:
    """A whole request, shared after every chunk; what is copied meanwhile has arrived when it ends."""
    seq = bench.seq(prompt)
    assert bench.admit(seq)
    while seq.kv.kv_committed_len < len(prompt):
        assert bench.compute(seq, min(len(prompt), seq.kv.kv_committed_len + (chunk or len(prompt))))
        if chunk is not None:
            bench.unfinished(seq)
            settle(bench)
    bench.finish(seq)
    settle(bench)


def settle(bench: CacheBench) -> None:
    if bench.tier is not None:
        bench.settle()


def free(bench: CacheBench) -> dict[str, int]:
    pools = bench.cache.keeper.pools.items(), bench.cache.keeper.host_pools.items()
    return {f"{where} {name}": pool.num_free for where, each in zip(("device", "host"), pools, strict=True) for name, pool in each}


def shape(bench: CacheBench) -> list[tuple[int, tuple[int, ...], str]]:
    return sorted((start, path, "D" * (node.full_pages is not None) + "H" * (node.host is not None)) for _, start, path, node in bench.spans())


def drain(bench: CacheBench) -> list[frozenset[tuple[int, ...]]]:
    """Evict page by page; what is left after each."""
    left = []
    while bench.cache.evictable_pages:
        assert bench.cache.ensure_pages(bench.cache.free_pages + 1)
        left.append(frozenset(path for _, _, path, _ in bench.spans()))
    return left


@every_part
@pytest.mark.parametrize("host", [False, True])
@quick
@given(prompts=prompts, asked=prompts)
def test_a_probes_change_nothing_and_matches_change_no_size(parts: str, host: bool, prompts: list[list[int]], asked: list[list[int]]) -> None:
    one, two, three = (CacheBench(page_size=2, num_pages=20, **{**PARTS[parts], **tier(parts, host)}) for _ in range(3))
    for bench in (one, two, three):
        for prompt in prompts:
            serve(bench, prompt)
    for tokens in asked:
        two.probe(tokens)
        sizes = three.cache.keeper.stats_of_others(), three.cache.free_pages, three.cache.evictable_pages
        three.cache.match_prefix(key(tokens))
        assert (three.cache.keeper.stats_of_others(), three.cache.free_pages, three.cache.evictable_pages) == sizes
    assert two.cache.pretty() == one.cache.pretty()
    assert drain(two) == drain(one)


@pytest.mark.parametrize("policy", POLICIES.names())
def test_b_the_heap_picks_what_a_sort_would(policy: str) -> None:
    rng = np.random.default_rng(3)
    root = UnifiedTreeNode(seq=0, tick=0, key=b"", start=0, end=0, parent=None)
    heap, alive = LazyHeap(POLICIES.get(policy)), []
    for tick in range(1, 1500):
        move = rng.random()
        if move < 0.3 or not alive:
            node = UnifiedTreeNode(seq=tick, tick=tick, key=b"", start=0, end=1, parent=root)
            node.full_pages = np.array([tick], dtype=np.int32)
            node.priority = int(rng.integers(0, 3))
            alive.append(node)
            heap.offer(node)
        elif move < 0.6:
            node = alive[rng.integers(len(alive))]
            node.tick, node.hits = tick, node.hits + int(rng.integers(0, 2))
            heap.touch(node, num_nodes=len(alive))
        elif move < 0.8:  # lock and unlock
            node = alive[rng.integers(len(alive))]
            node.pins = 1 - node.pins
            if not node.pins:
                heap.offer(node)
        else:
            free = [node for node in alive if not node.pins]
            want = min(free, key=lambda n: (*_sort_key(policy, n), n.seq), default=None)
            assert heap.pop() is want
            if want is not None:
                want.alive = False
                alive.remove(want)
        if tick % 50 == 0:
            heap.check([node for node in alive if not node.pins])


def _sort_key(policy: str, node: UnifiedTreeNode) -> tuple[int, ...]:
    class Seen:
        used, born, hits, priority = node.tick, node.created, node.hits, node.priority

    return SORT_KEYS[policy](Seen)  # type: ignore[arg-type]


def test_b_stale_entries_of_a_falling_key_are_compacted() -> None:
    root = UnifiedTreeNode(seq=0, tick=0, key=b"", start=0, end=0, parent=None)
    heap, nodes = LazyHeap(POLICIES.get("mru")), [UnifiedTreeNode(seq=i, tick=i, key=b"", start=0, end=1, parent=root) for i in range(1, 4)]
    for node in nodes:
        node.full_pages = np.array([node.seq], dtype=np.int32)
        heap.offer(node)
    for tick in range(10, 10_000):
        nodes[tick % 3].tick = tick
        heap.touch(nodes[tick % 3], num_nodes=3)
        assert len(heap) <= 2 * 3 + 1024
    assert [heap.pop() for _ in range(3)] == heapq.nlargest(3, nodes, key=lambda node: node.tick)


@pytest.mark.parametrize("host", [False, True])
@quick
@given(prompts=prompts)
def test_c_two_instances_with_windows_and_states_evict_the_same(host: bool, prompts: list[list[int]]) -> None:
    benches = [CacheBench(page_size=1, num_pages=14, window=(3, 14), states=(1, 4), **tier("full+swa+mamba", host)) for _ in range(2)]
    for bench in benches:
        for prompt in prompts:
            serve(bench, prompt)
    assert benches[0].cache.pretty() == benches[1].cache.pretty()
    assert benches[0].host is None or [*benches[0].host.evictions.items()] == [*benches[1].host.evictions.items()]
    one, two = ([pool.free_pages().tolist() for pool in bench.cache.keeper.pools.values()] for bench in benches)
    assert one == two


@quick
@given(prompts=prompts, policy=st.sampled_from(POLICIES.names()))
def test_c_two_instances_with_the_same_calls_evict_the_same(prompts: list[list[int]], policy: str) -> None:
    one = CacheBench(page_size=1, num_pages=14, policy=policy)
    two = CacheBench(page_size=1, num_pages=14, policy=policy)
    for prompt in prompts:
        one.serve(prompt)
    for prompt in prompts:
        two.serve(prompt)
        two.probe(prompt[::-1])
    assert one.cache.pretty() == two.cache.pretty()
    assert drain(one) == drain(two)
    assert one.cache.allocator.free_pages().tolist() == two.cache.allocator.free_pages().tolist()


@every_part
@pytest.mark.parametrize("host", [False, True])
@quick
@given(prompts=prompts, size=st.sampled_from((2, 4, 16)), policy=st.sampled_from(POLICIES.names()))
def test_d_pages_of_k_tokens_are_pages_of_one_when_prompts_are_whole_pages(
    parts: str, host: bool, prompts: list[list[int]], size: int, policy: str
) -> None:
    """One token of the small cache stands for a page of k equal tokens of the other; a window of 3 for one of 3k, a grid of 1 for one of k."""

    def bench(k: int) -> CacheBench:
        kinds = {"window": (3 * k, 15)} if "swa" in parts else {}
        kinds |= {"states": (k, 6)} if "mamba" in parts else {}
        return CacheBench(page_size=k, num_pages=20, policy=policy, **kinds, **tier(parts, host))

    small, large = bench(1), bench(size)
    for prompt in prompts:
        serve(small, prompt)
        serve(large, [token for token in prompt for _ in range(size)])
        assert [(start * size, len(path) * size, where) for start, path, where in shape(small)] == [
            (start, len(path), where) for start, path, where in shape(large)
        ]
        assert free(large) == free(small)


@every_part
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_e_the_order_in_which_duplicates_finish_does_not_change_what_is_used(parts: str, order: tuple[int, ...]) -> None:
    bench = CacheBench(page_size=2, **PARTS[parts])
    runs = [bench.run([1, 2, 3, 4]) for _ in range(3)]
    for seq in runs:
        seq.tokens.append(5)
        assert bench.reserve(seq, 5)
    for i in order:
        bench.finish(runs[i])
        bench.check()
    assert (bench.cache.free_pages, bench.cache.evictable_pages, shape(bench)) == (62, 2, [(0, (1, 2, 3, 4), "D")])
    pools = bench.cache.keeper.pools
    assert {name: pool.num_pages - pool.num_free for name, pool in pools.items()} == {name: {"full": 2, "swa": 2, "mamba": 1}[name] for name in pools}


@every_part
@pytest.mark.parametrize("host", [False, True])
@quick
@given(prompts=prompts, asked=prompts)
def test_f_a_probe_says_what_a_match_gives_and_a_match_of_more_goes_on_from_it(
    parts: str, host: bool, prompts: list[list[int]], asked: list[list[int]]
) -> None:
    bench = CacheBench(page_size=2, num_pages=16, **{**PARTS[parts], **tier(parts, host)})
    for prompt in prompts:
        serve(bench, prompt)
    for tokens in asked:
        seen = bench.probe(tokens)
        found = bench.cache.match_prefix(key(tokens))
        assert found.device_prefix_len == seen == bench.probe(tokens)
        assert bench.probe([*tokens, 0, 1]) >= seen
        bench.check()


@pytest.mark.parametrize("host", [False, True])
@quick
@given(prompts=prompts, policy=st.sampled_from(POLICIES.names()), size=st.sampled_from((1, 2)), chunk=st.integers(1, 12), pages=st.integers(12, 20))
def test_g_a_window_as_long_as_everything_changes_nothing(
    host: bool, prompts: list[list[int]], policy: str, *, size: int, chunk: int, pages: int
) -> None:
    """Chunk by chunk, under pressure, with a host tier or without."""
    plain = CacheBench(page_size=size, num_pages=pages, policy=policy, **tier("full", host))
    windowed = CacheBench(page_size=size, num_pages=pages, policy=policy, window=(64, 200), **tier("full+swa", host, windows=200))
    for prompt in prompts:
        for bench in (plain, windowed):
            serve(bench, prompt, chunk=chunk)
        windowed.check()
        assert shape(windowed) == shape(plain)
        for bench in (plain, windowed):
            if host and bench.load_back(prompt) is not None:
                bench.settle()
        assert shape(windowed) == shape(plain)
    assert [windowed.probe(prompt) for prompt in prompts] == [plain.probe(prompt) for prompt in prompts]
    assert drain(windowed) == drain(plain)


@every_part
@pytest.mark.parametrize("host", [False, True])
@quick
@given(prompts=prompts, later=prompts, policy=st.sampled_from(POLICIES.names()))
def test_h_a_flushed_cache_is_a_fresh_one(parts: str, host: bool, prompts: list[list[int]], later: list[list[int]], policy: str) -> None:
    used, fresh = (CacheBench(page_size=2, policy=policy, num_pages=20, **{**PARTS[parts], **tier(parts, host)}) for _ in range(2))
    for prompt in prompts:
        serve(used, prompt)
    assert used.cache.flush()
    used.check()
    for bench in (used, fresh):
        for prompt in later:
            serve(bench, prompt)
    assert shape(used) == shape(fresh)
    assert used.cache.allocator.free_pages().tolist() == fresh.cache.allocator.free_pages().tolist()
    assert free(used) == free(fresh)
    assert drain(used) == drain(fresh)
