"""Rows of running requests and their page table, on the host (architecture D3): row -> the pages of its positions, in order.

Owns rows, the table of KV pages, and further tables over the same rows (a model with windows has a second one, `add_table`).
It does not own pages: `cache` says who frees them.

                 page index   0   1   2   3  ...
    table[0]   padding sink [ 0   0   0   0 ]     never allocated, never written
    table[row]              [17   4   9   0 ]     positions [0, page_size) of the request live in page 17, the next in page 4, ...
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rootlet.core.step import IntArray, PageDelta
from rootlet.memory.page_table import PageTable


class ReqToTokenPool:
    """Rows 1..max_rows, LIFO. `generation(row)` grows at each allocation, even across `clear`, so a stale (row, generation) pair shows."""

    __slots__ = ("_free_rows", "_generation", "_held", "_tables", "max_pages_per_row", "max_rows", "table")

    def __init__(self, max_rows: int, max_pages_per_row: int) -> None:
        assert min(max_rows, max_pages_per_row) >= 1, f"a pool of {max_rows} rows x {max_pages_per_row} pages holds nothing"
        self.max_rows = max_rows
        self.max_pages_per_row = max_pages_per_row
        self._tables: list[PageTable] = []
        self.table: IntArray = self.add_table().cells
        self._generation: npt.NDArray[np.int64] = np.zeros(max_rows + 1, dtype=np.int64)
        self._held: npt.NDArray[np.bool_] = np.zeros(max_rows + 1, dtype=np.bool_)
        self._free_rows = list(range(max_rows, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    @property
    def num_held(self) -> int:
        return self.max_rows - len(self._free_rows)

    def add_table(self) -> PageTable:
        """One more table over the same rows, for pages of another pool. The caller writes it; a freed row is forgotten in all of them."""
        table = PageTable(self.max_rows + 1, self.max_pages_per_row)
        self._tables.append(table)
        return table

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
        for table in self._tables:
            table.forget(row)
        self._free_rows.append(row)

    def write(self, row: int, start_page: int, pages: IntArray) -> None:
        """table[row, start_page : start_page + len(pages)] = pages, and remember that the executor must hear of it."""
        self._assert_held(row)
        self._tables[0].write(row, start_page, pages)

    def pages(self, row: int, start: int, stop: int) -> IntArray:
        """Copy of the page ids at page indexes [start, stop) of a held row, int32 [stop - start]."""
        self._assert_held(row)
        return self._tables[0].pages(row, start, stop)

    def take_deltas(self) -> tuple[PageDelta, ...]:
        """`PageTable.take_deltas` of the KV pages."""
        return self._tables[0].take_deltas()

    def clear(self) -> None:
        """Rows are handed out in the order of a fresh pool again; generations go on. Only when no row is held."""
        assert self.num_held == 0, f"C5: {self.num_held} rows are held"
        self._free_rows = list(range(self.max_rows, 0, -1))

    def _assert_held(self, row: int) -> None:
        assert 1 <= row <= self.max_rows, f"C5: there is no row {row}"
        assert self._held[row], f"C5: row {row} is not held"
