"""KV events: what routers hear equals what the tree holds; rows 19, 20, 21 of the design's table of field bugs; sequence and replay."""

from __future__ import annotations

import pytest

from fixtures.cache_bench import CacheBench, hash_path
from rootlet.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventRecorder
from rootlet.core.types import Namespace


def bench_of(**more: object) -> CacheBench:
    return CacheBench(page_size=2, events=True, **more)  # type: ignore[arg-type]


def test_row_19_a_split_is_silent_and_equal_pages_hash_by_their_place() -> None:
    bench = bench_of()
    bench.serve([1, 2, 3, 4])
    bench.hear()
    bench.serve([1, 2, 5, 6])
    one, two = hash_path(Namespace(), (1, 2, 5, 6), 2)
    assert bench.hear() == [BlockStored((two,), one, (5, 6), 2)]
    bench.serve([7, 7, 7, 7])
    (event,) = bench.hear()
    assert len(set(event.block_hashes)) == 2
    assert event.parent_block_hash is None


def test_row_20_equal_tokens_of_other_namespaces_hash_apart() -> None:
    spaces = [Namespace(), Namespace("x"), Namespace(None, "x"), Namespace(None, None, "x"), Namespace("a", "bc"), Namespace("ab", "c")]
    bench = bench_of()
    for space in spaces:
        bench.serve([1, 2, 3, 4], space)
    events = bench.hear()
    assert [event.lora_name for event in events] == [space.lora_id for space in spaces]
    assert len({block for event in events for block in event.block_hashes}) == 2 * len(spaces)
    bench.serve([1, 2, 3, 4], Namespace("", "", ""))
    assert bench.hear() == []


@pytest.mark.parametrize("how", ["full", "trim", "window", "state", "flush"])
def test_row_21_every_way_to_lose_a_node_is_told(how: str) -> None:
    bench = bench_of(window=(4, 60), states=(2, 20))
    bench.serve([1, 2, 3, 4])
    bench.serve([9, 9])
    bench.hear()
    keeper = bench.cache.keeper
    if how == "flush":
        assert bench.cache.flush()
        assert bench.hear() == [AllBlocksCleared()]
        return
    name, count = {"full": ("full", 2), "trim": ("full", 1), "window": ("swa", 1), "state": ("mamba", 1)}[how]
    assert keeper.ensure(name, keeper.pools[name].num_free + count)
    hashes = tuple(hash_path(Namespace(), (1, 2, 3, 4), 2))
    assert bench.hear() == [BlockRemoved(hashes[-1:] if how == "trim" else hashes)]


def test_a_lost_window_or_state_inside_the_tree_is_silent() -> None:
    bench = bench_of(window=(2, 60), states=(2, 20))
    for tokens in ([1, 2], [1, 2, 3, 4]):
        bench.serve(tokens)
    bench.hear()
    assert bench.cache.keeper.ensure("swa", 59)
    assert bench.hear() == []


def test_a_shared_hit_is_silent_and_what_goes_on_is_one_event() -> None:
    bench = bench_of()
    seq = bench.run([1, 2, 3, 4])
    seq.tokens += [5, 6, 7]
    assert bench.compute(seq, 7)
    bench.finish(seq, prompt_len=4)  # stored in two steps
    bench.serve([1, 2, 3, 4])
    hashes = hash_path(Namespace(), (1, 2, 3, 4, 5, 6), 2)
    assert bench.hear() == [BlockStored(tuple(hashes), None, (1, 2, 3, 4, 5, 6), 2)]


def test_batches_are_numbered_and_the_last_ones_can_be_had_again() -> None:
    recorder = EventRecorder(replay_batches=2)
    assert recorder.take() is None
    for i in range(3):
        recorder.record(BlockRemoved((bytes([i]),)))
        assert recorder.take().sequence == i
    assert [batch.sequence for batch in recorder.replay(0)] == [1, 2]
    assert [batch.events[0].block_hashes for batch in recorder.replay(2)] == [(b"\x02",)]
    assert recorder.replay(3) == ()
    assert recorder.next_sequence == 3
