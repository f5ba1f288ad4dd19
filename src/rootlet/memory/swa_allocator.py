"""The window pool: pages of sliding-window layers, and the second page table that says which of them a running request uses.

A window page is named by itself, not through a KV page of the same positions: a request gives the window pages behind its window back and
keeps the KV pages. Cell 0 = no window page there (released, or never read). Owns the free list and the table; who frees what, `cache` says.
"""

from __future__ import annotations

import numpy as np

from rootlet.core.step import IntArray
from rootlet.memory.page_allocator import PageAllocator
from rootlet.memory.req_to_token import ReqToTokenPool


class SWAAllocator:
    """`window_len` keys are visible, the query's own included (architecture D5). One page holds as many tokens as a KV page."""

    __slots__ = ("pages", "table", "window_len")

    def __init__(self, num_pages: int, window_len: int, req_to_token: ReqToTokenPool) -> None:
        assert window_len >= 1, f"a window of {window_len} keys sees nothing"
        self.window_len = window_len
        self.pages = PageAllocator(num_pages)
        self.table = req_to_token.add_table()

    def take(self, row: int, start: int, stop: int) -> bool:
        """Fresh pages at page indexes [start, stop) of `row`; False, and nothing changes, when fewer are free."""
        pages = self.pages.alloc(stop - start)
        if pages is None:
            return False
        self.table.write(row, start, pages)
        return True

    def give_back(self, row: int, start: int, stop: int) -> None:
        """Free the request's own pages at page indexes [start, stop) of `row`; the cells become 0."""
        if start < stop:
            self.pages.free(self.table.pages(row, start, stop))
            self.table.write(row, start, np.zeros(stop - start, dtype=np.int32))

    def set_row(self, row: int, pages: IntArray) -> None:
        """The first cells of a fresh row; all others become 0, whatever an earlier holder left."""
        cells = np.zeros(self.table.max_pages_per_row, dtype=np.int32)
        cells[: len(pages)] = pages
        self.table.write(row, 0, cells)
