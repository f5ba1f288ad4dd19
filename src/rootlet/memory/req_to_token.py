"""The page table of running requests, on the host (architecture D3): row -> the pages of its positions, in order.

Owns rows, the table, and the list of table cells that the executor has not seen yet. It does not own pages: `cache` says who frees them.
`write` is the only way to change the table, so no change can miss the deltas.

                 page index   0   1   2   3  ...
    table[0]   padding sink [ 0   0   0   0 ]     never allocated, never written
    table[row]              [17   4   9   0 ]     positions [0, page_size) of the request live in page 17, the next in page 4, ...
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rootlet.core.step import IntArray, PageDelta


class ReqToTokenPool:
    """Rows 1..max_rows, LIFO. `generation(row)` grows at each allocation, even across `clear`, so a stale (row, generation) pair shows."""

    __slots__ = ("_free_rows", "_generation", "_held", "_unsent", "max_pages_per_row", "max_rows", "table")

    def __init__(self, max_rows: int, max_pages_per_row: int) -> None:
        assert min(max_rows, max_pages_per_row) >= 1, f"a pool of {max_rows} rows x {max_pages_per_row} pages holds nothing"
        self.max_rows = max_rows
        self.max_pages_per_row = max_pages_per_row
        self.table: IntArray = np.zeros((max_rows + 1, max_pages_per_row), dtype=np.int32)
        self._generation: npt.NDArray[np.int64] = np.zeros(max_rows + 1, dtype=np.int64)
        self._held: npt.NDArray[np.bool_] = np.zeros(max_rows + 1, dtype=np.bool_)
        self._free_rows = list(range(max_rows, 0, -1))
        self._unsent: dict[int, list[tuple[int, int]]] = {}  # row -> half-open ranges of page indexes written since the last take

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    @property
    def num_held(self) -> int:
        return self.max_rows - len(self._free_rows)

    def generation(self, row: int) -> int:
        """How often `row` has been handed out."""
        return int(self._generation[row])

    def alloc_row(self) -> int | None:
        """Take a row, which the caller gives back with `free_row`; None when all are held."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._held[row] = True
        self._generation[row] += 1
        return row

    def free_row(self, row: int) -> None:
        """Give `row` back. What was not sent of it is dropped: no later plan names the row before it is written anew.

        Raises: AssertionError when the row is not held.
        """
        self._assert_held(row)
        self._held[row] = False
        self._unsent.pop(row, None)
        self._free_rows.append(row)

    def write(self, row: int, start_page: int, pages: IntArray) -> None:
        """table[row, start_page : start_page + len(pages)] = pages, and remember that the executor must hear of it."""
        self._assert_held(row)
        stop = start_page + len(pages)
        assert 0 <= start_page <= stop <= self.max_pages_per_row, f"R1: pages [{start_page}, {stop}) of a row of {self.max_pages_per_row}"
        if start_page == stop:
            return
        self.table[row, start_page:stop] = pages
        ranges = self._unsent.setdefault(row, [])
        if ranges and ranges[-1][1] == start_page:  # a growing row: keep one range instead of one a step
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start_page, stop))

    def pages(self, row: int, start: int, stop: int) -> IntArray:
        """Copy of the page ids at page indexes [start, stop) of a held row, int32 [stop - start]."""
        self._assert_held(row)
        assert 0 <= start <= stop <= self.max_pages_per_row, f"R1: pages [{start}, {stop}) of a row of {self.max_pages_per_row}"
        return self.table[row, start:stop].copy()

    def take_deltas(self) -> tuple[PageDelta, ...]:
        """What was written since the last call, ordered by (row, start_page), disjoint, adjacent ranges joined. The caller must send them all.

        Values are read now, so a cell that was written twice travels once, with its last value.
        """
        deltas = tuple(
            PageDelta(pool_row=row, start_page=start, pages=self.table[row, start:stop].copy())
            for row in sorted(self._unsent)
            for start, stop in _joined(self._unsent[row])
        )
        self._unsent.clear()
        return deltas

    def clear(self) -> None:
        """Rows are handed out in the order of a fresh pool again; generations go on. Only when no row is held."""
        assert self.num_held == 0, f"C5: {self.num_held} rows are held"
        self._free_rows = list(range(self.max_rows, 0, -1))

    def _assert_held(self, row: int) -> None:
        assert 1 <= row <= self.max_rows, f"C5: there is no row {row}"
        assert self._held[row], f"C5: row {row} is not held"


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of half-open ranges as ascending ranges with gaps between them."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined
