"""Groups of rows with the same leading pages: found, split where that saves more, and forgotten when a page is replaced."""

from __future__ import annotations

import numpy as np

from rootlet.attention.metadata import shared_items
from rootlet.attention.shared import SharedPrefixes, SharedRows, shared_rows
from rootlet.core.step import PageDelta


def tables(*rows: list[int]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([r + [0] * (width - len(r)) for r in rows], np.int32)


def found(groups: list[SharedRows]) -> list[tuple[int, list[int]]]:
    return sorted((g.keys, g.members.tolist()) for g in groups)


def test_rows_with_the_same_leading_pages_are_one_group_in_whole_cuts() -> None:
    common = [1, 2, 3, 4, 5]  # 320 keys of 64: two cuts and a half
    table = tables(*([*common, 10 + i] for i in range(4)), [7, 8, 9, 10, 11, 12])
    assert found(shared_rows(table, np.full(5, 384, np.int32), 64)) == [(256, [0, 1, 2, 3])]


def test_computed_positions_limit_what_is_shared() -> None:
    table = tables(*[[1, 2, 3, 4, 5, 6]] * 4)
    assert found(shared_rows(table, np.array([384, 384, 255, 384], np.int32), 64)) == [(128, [0, 1, 2, 3])]
    assert found(shared_rows(table, np.array([384, 384, 127, 384], np.int32), 64)) == []


def test_three_rows_are_not_worth_a_group() -> None:
    assert found(shared_rows(tables(*[[1, 2]] * 3), np.full(3, 128, np.int32), 64)) == []


def test_a_group_splits_where_longer_prefixes_save_more() -> None:
    """Eight rows share one cut; the first four share five cuts more, the others one: 4 * 3 ... against 7 of one cut."""
    left, right = [1, 2, *range(10, 20)], [1, 2, 30, 31]
    table = tables(*[[*left, 100 + i] for i in range(4)], *[[*right, 200 + i] for i in range(4)])
    lens = np.array([832] * 4 + [320] * 4, np.int32)
    assert found(shared_rows(table, lens, 64)) == [(256, [4, 5, 6, 7]), (768, [0, 1, 2, 3])]


def test_groups_are_found_anew_when_pages_or_rows_change() -> None:
    prefixes = SharedPrefixes(8, 64)
    table = np.zeros((9, 8), np.int32)
    table[1:6, :3] = [1, 2, 3]
    rows, lens, ones = np.arange(1, 6, dtype=np.int32), np.full(5, 192, np.int32), np.ones(5, np.int32)
    assert found(prefixes.find(table, rows, lens, ones, ())) == [(128, [0, 1, 2, 3, 4])]
    appended = PageDelta(2, 3, np.array([77], np.int32))
    table[2, 3] = 77
    assert found(prefixes.find(table, rows, lens, ones, (appended,))) == [(128, [0, 1, 2, 3, 4])]
    table[2, 0] = 66
    replaced = prefixes.find(table, rows, lens, ones, (PageDelta(2, 0, np.array([66], np.int32)),))
    assert found(replaced) == [], "no cache makes such a table; not grouping is always right"
    table[2, 1] = 67
    assert found(prefixes.find(table, rows, lens, ones, (PageDelta(2, 1, np.array([67], np.int32)),))) == [(128, [0, 2, 3, 4])]
    assert found(prefixes.find(table, rows[1:], lens[1:], ones[1:], ())) == []
    extending = ones.copy()
    extending[4] = 5
    assert found(prefixes.find(table, rows, lens, extending, ())) == []


def test_items_of_a_group_name_each_member_once_for_each_head() -> None:
    groups = [SharedRows(256, np.arange(3, 19, dtype=np.int32)), SharedRows(512, np.array([0, 1, 2, 30], np.int32))]
    prefix = np.arange(600, 640, dtype=np.int32)
    items, order = shared_items(groups, prefix, 3)
    for head in range(3):
        mine = items[items[:, 2] == head]
        named = [order[begin : begin + count].tolist() for count, begin in mine[:, [1, 7]].tolist()]
        assert sorted(x for part in named for x in part) == [*range(19), 30]
        assert [x[3] for x in mine.tolist()] == [max(n, key=lambda i: prefix[i]) for n in named]
        assert [x[5] for x in mine.tolist()] == [int(prefix[n].max()) + 1 for n in named]
    assert items[:, 6].tolist() == [256] * 12 + [512] * 6
    assert len(items) >= 8
