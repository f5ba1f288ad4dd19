"""A page table on the host: row -> the pages of its positions, in order, and which cells the executor has not seen yet.

Integers only. It does not know which rows are held (`ReqToTokenPool` does) and does not own pages (`cache` says who frees them).
`write` is the only way to change the table, so no change can miss the deltas.
"""

from __future__ import annotations

import numpy as np

from rootlet.core.step import IntArray, PageDelta


class PageTable:
    """int32 [num_rows, max_pages_per_row]; row 0 is the padding sink and stays 0."""

    __slots__ = ("_unsent", "cells", "max_pages_per_row")

    def __init__(self, num_rows: int, max_pages_per_row: int) -> None:
        self.max_pages_per_row = max_pages_per_row
        self.cells: IntArray = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self._unsent: dict[int, list[tuple[int, int]]] = {}  # row -> half-open ranges of page indexes written since the last take

    def write(self, row: int, start_page: int, pages: IntArray) -> None:
        """cells[row, start_page : start_page + len(pages)] = pages, and remember that the executor must hear of it."""
        stop = start_page + len(pages)
        assert 0 <= start_page <= stop <= self.max_pages_per_row, f"R1: pages [{start_page}, {stop}) of a row of {self.max_pages_per_row}"
        if start_page == stop:
            return
        self.cells[row, start_page:stop] = pages
        ranges = self._unsent.setdefault(row, [])
        if ranges and ranges[-1][1] == start_page:  # a growing row: keep one range instead of one a step
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start_page, stop))

    def pages(self, row: int, start: int, stop: int) -> IntArray:
        """Copy of the page ids at page indexes [start, stop) of a row, int32 [stop - start]."""
        assert 0 <= start <= stop <= self.max_pages_per_row, f"R1: pages [{start}, {stop}) of a row of {self.max_pages_per_row}"
        return self.cells[row, start:stop].copy()

    def forget(self, row: int) -> None:
        """What was not sent of `row` is dropped: no later plan names the row before it is written anew."""
        self._unsent.pop(row, None)

    def take_deltas(self) -> tuple[PageDelta, ...]:
        """What was written since the last call, ordered by (row, start_page), disjoint, adjacent ranges joined. The caller must send them all.

        Values are read now, so a cell that was written twice travels once, with its last value.
        """
        deltas = tuple(
            PageDelta(pool_row=row, start_page=start, pages=self.cells[row, start:stop].copy())
            for row in sorted(self._unsent)
            for start, stop in _joined(self._unsent[row])
        )
        self._unsent.clear()
        return deltas


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of half-open ranges as ascending ranges with gaps between them."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined
