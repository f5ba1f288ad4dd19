"""ReqToTokenPool: rows, generations, and deltas that always rebuild the table elsewhere."""

import numpy as np
import pytest

from rootlet.memory.req_to_token import ReqToTokenPool


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def sent(pool: ReqToTokenPool) -> list[tuple[int, int, list[int]]]:
    return [(delta.pool_row, delta.start_page, delta.pages.tolist()) for delta in pool.take_deltas()]


def test_rows_start_at_1_run_out_and_are_reused_last_in_first_out() -> None:
    pool = ReqToTokenPool(3, 4)
    assert [pool.alloc_row() for _ in range(4)] == [1, 2, 3, None]
    pool.free_row(1)
    pool.free_row(3)
    assert (pool.num_free, pool.num_held) == (2, 1)
    assert [pool.alloc_row(), pool.alloc_row()] == [3, 1]


def test_generations_grow_even_through_clear() -> None:
    pool = ReqToTokenPool(2, 4)
    seen = []
    for _ in range(3):
        row = pool.alloc_row()
        seen.append((row, pool.generation(row)))
        pool.free_row(row)
        pool.clear()
    assert seen == [(1, 1), (1, 2), (1, 3)]


def test_clear_is_refused_while_a_row_is_held() -> None:
    pool = ReqToTokenPool(2, 4)
    pool.alloc_row()
    with pytest.raises(AssertionError, match="C5"):
        pool.clear()


@pytest.mark.parametrize("row", [0, 1, 3, -1])
def test_only_held_rows_can_be_freed_read_or_written(row: int) -> None:
    pool = ReqToTokenPool(2, 4)
    for use in (lambda: pool.free_row(row), lambda: pool.pages(row, 0, 1), lambda: pool.write(row, 0, pages(5))):
        with pytest.raises(AssertionError, match="C5"):
            use()
    assert not pool.table.any()


def test_a_write_past_the_row_is_refused() -> None:
    pool = ReqToTokenPool(1, 4)
    row = pool.alloc_row()
    with pytest.raises(AssertionError, match="R1"):
        pool.write(row, 3, pages(5, 6))
    with pytest.raises(AssertionError, match="R1"):
        pool.pages(row, 2, 5)
    assert sent(pool) == []


def test_adjacent_and_overlapping_writes_of_a_row_travel_as_one_delta_with_the_last_values() -> None:
    pool = ReqToTokenPool(2, 8)
    one, two = pool.alloc_row(), pool.alloc_row()
    pool.write(two, 0, pages(20))
    pool.write(one, 0, pages(1, 2))
    pool.write(one, 2, pages(3))
    pool.write(one, 5, pages(6))
    pool.write(one, 1, pages(12))  # the cache re-points
    assert sent(pool) == [(one, 0, [1, 12, 3]), (one, 5, [6]), (two, 0, [20])]
    assert sent(pool) == []


def test_an_empty_write_is_no_delta() -> None:
    pool = ReqToTokenPool(1, 8)
    pool.write(pool.alloc_row(), 0, pages())
    assert sent(pool) == []


def test_deltas_of_a_freed_row_are_dropped_also_when_the_row_is_reused() -> None:
    pool = ReqToTokenPool(1, 8)
    row = pool.alloc_row()
    pool.write(row, 0, pages(1, 2, 3))
    pool.free_row(row)
    assert pool.alloc_row() == row
    pool.write(row, 1, pages(9))
    assert sent(pool) == [(row, 1, [9])]


def test_pages_and_deltas_are_snapshots() -> None:
    pool = ReqToTokenPool(1, 8)
    row = pool.alloc_row()
    pool.write(row, 0, pages(1, 2))
    read, (delta,) = pool.pages(row, 0, 2), pool.take_deltas()
    pool.write(row, 0, pages(7))
    assert read.tolist() == delta.pages.tolist() == [1, 2]
    assert pool.pages(row, 0, 2).tolist() == [7, 2]


def test_replaying_deltas_rebuilds_the_table_under_random_writes() -> None:
    rng = np.random.default_rng(1)
    pool = ReqToTokenPool(4, 12)
    elsewhere, rows = np.zeros_like(pool.table), [pool.alloc_row() for _ in range(4)]
    for step in range(200):
        row, start = rows[rng.integers(4)], int(rng.integers(0, 12))
        pool.write(row, start, rng.integers(1, 99, size=rng.integers(0, 13 - start)).astype(np.int32))
        if step % 7 == 0:
            for delta in pool.take_deltas():
                elsewhere[delta.pool_row, delta.start_page : delta.start_page + len(delta.pages)] = delta.pages
            assert elsewhere.tolist() == pool.table.tolist()
