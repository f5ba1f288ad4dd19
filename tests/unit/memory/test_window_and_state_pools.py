"""SWAAllocator and StateAllocator: second table over the same rows; operations that outlive their slots."""

import numpy as np
import pytest

from rootlet.core.step import StateOp
from rootlet.memory.req_to_token import ReqToTokenPool
from rootlet.memory.state_allocator import StateAllocator
from rootlet.memory.swa_allocator import SWAAllocator


def test_window_pages_live_in_a_table_of_their_own_over_the_same_rows() -> None:
    rows = ReqToTokenPool(2, 4)
    window = SWAAllocator(5, 3, rows)
    row = rows.alloc_row()
    rows.write(row, 0, np.array([7], dtype=np.int32))
    window.set_row(row, np.array([0, 0], dtype=np.int32))
    assert window.take(row, 2, 4)
    assert window.table.cells[row].tolist() == [0, 0, 1, 2]
    assert rows.pages(row, 0, 4).tolist() == [7, 0, 0, 0]
    assert [delta.pages.tolist() for delta in window.table.take_deltas()] == [[0, 0, 1, 2]]
    assert [delta.pages.tolist() for delta in rows.take_deltas()] == [[7]]
    window.give_back(row, 2, 3)
    assert (window.pages.num_free, window.table.cells[row].tolist()) == (4, [0, 0, 0, 2])
    rows.free_row(row)
    assert window.table.take_deltas() == ()


def test_a_shortage_takes_nothing() -> None:
    rows = ReqToTokenPool(1, 4)
    window = SWAAllocator(1, 3, rows)
    row = rows.alloc_row()
    assert not window.take(row, 0, 2)
    assert (window.pages.num_free, window.table.take_deltas()) == (1, ())


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="window of 0"):
        SWAAllocator(4, 0, ReqToTokenPool(1, 1))


def test_states_are_copied_in_the_order_they_were_asked_for() -> None:
    states = StateAllocator(2, 4)
    one = states.alloc()
    two = states.alloc(src=one)
    assert states.alloc() is None
    states.free(one)
    again = states.alloc()
    assert states.take_ops() == (StateOp(one), StateOp(two, src=one), StateOp(again))
    assert (again, states.take_ops()) == (one, ())
