"""The Mooncake trace as requests: made small they use the pages that whole ones use, and the real scheduler finds what the bound says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootlet.bench import mooncake
from rootlet.bench.mooncake import BLOCK_LEN, FIRST_ID, Turn, read, repeated_blocks, small, small_vocab, whole
from rootlet.bench.offline_bound import best_hits, unlimited_hits
from rootlet.bench.trace import serve, size_of
from rootlet.core.errors import BadConfig


def turn(at_s: float, input_len: int, output_len: int, *block_ids: int) -> Turn:
    return Turn(at_s, input_len, output_len, block_ids)


@given(st.integers(1, 3000), st.integers(1, 2000))
def test_a_small_request_touches_and_fills_as_many_pages_as_the_whole_one(input_len: int, output_len: int) -> None:
    one = turn(0, input_len, output_len, *range(-(-input_len // BLOCK_LEN)))
    prompt, max_new = small(one, 0)
    length = len(prompt) // 4
    whole_len = input_len + output_len - 1  # the last token drawn is never written
    assert length // 2 == input_len // BLOCK_LEN
    assert (length - 1) // 2 == (input_len - 1) // BLOCK_LEN, "what may come from a cache"
    assert (length + max_new - 1) // 2 == whole_len // BLOCK_LEN
    assert max_new >= 1


def test_small_tokens_say_which_block_and_nobody_shares_what_is_left_over() -> None:
    turns = [turn(0, 2 * BLOCK_LEN + 1, 1, 3, 4, 5), turn(0, 2 * BLOCK_LEN + 1, 1, 3, 4, 5)]
    first, second = (np.frombuffer(small(each, number)[0], dtype="<i4").tolist() for number, each in enumerate(turns))
    assert first[:4] == second[:4]
    assert len(set(first)) == 5
    assert first[4] != second[4]
    assert min(first + second) >= FIRST_ID
    assert max(first + second) < small_vocab(turns)


def test_whole_tokens_follow_from_the_block_alone() -> None:
    one, two = (np.frombuffer(whole(turn(0, BLOCK_LEN + extra, 1, 7, 9))[0], dtype="<i4") for extra in (1, 300))
    assert one.tolist() == two[: BLOCK_LEN + 1].tolist()
    assert len(set(two.tolist())) > 800, "blocks and places differ"
    assert two.min() >= FIRST_ID


def write(folder: Path) -> list[Turn]:
    rows = [(0, 1100, 3, [0, 1, 2]), (0, 1500, 600, [0, 1, 3]), (3000, 1100, 1, [0, 1, 2]), (6000, 512, 1, [0]), (6000, 700, 9, [0, 1])]
    lines = (json.dumps({"timestamp": at, "input_length": n, "output_length": out, "hash_ids": ids}) for at, n, out, ids in rows)
    (folder / mooncake.FILE).write_text("\n".join(lines) + "\n")
    return read(folder)


def test_the_traces_own_measure_by_hand(tmp_path: Path) -> None:
    """2 of the second, all 3 of the third (the partial block, too), 1 of the fourth, 2 of the fifth; of whole blocks 2 + 2 + 0 + 1."""
    turns = write(tmp_path)
    assert repeated_blocks(turns) == (8, 12)
    assert unlimited_hits([each.visit() for each in turns]) == 5
    assert mooncake.percent_of_tokens(5, turns) == pytest.approx(100 * 5 * 512 / 4912)


def test_the_real_scheduler_finds_exactly_the_bound_in_either_size(tmp_path: Path) -> None:
    turns = write(tmp_path)
    for is_whole in (False, True):
        served = serve(turns, num_pages=40, rows=1, size=size_of(turns, is_whole=is_whole))
        assert (served.hit_blocks, served.evicted_pages) == (5, 0)


@given(st.lists(st.tuples(st.sampled_from([(1,), (1, 2), (1, 2, 3), (1, 4), (5,), (5, 6)]), st.integers(0, 511)), min_size=1, max_size=12))
def test_no_eviction_policy_beats_the_offline_optimum(requests: list[tuple[tuple[int, ...], int]]) -> None:
    turns = [turn(i, len(ids) * BLOCK_LEN - 511 + rest, 1, *ids) for i, (ids, rest) in enumerate(requests)]
    visits = [each.visit() for each in turns]
    for evict in ("lru", "filo"):
        assert serve(turns, num_pages=5, rows=1, evict=evict).hit_blocks <= best_hits(visits, 5) <= unlimited_hits(visits)


def test_a_folder_without_the_trace_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="DATA=folder"):
        read(tmp_path)
