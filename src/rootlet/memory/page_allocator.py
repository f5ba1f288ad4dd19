"""Free list of KV pages: integers only, no tensor.

Owns which page ids are free. Does not know who holds the others (`memory.ledger` proves that the sums fit) and never evicts (`cache` does).
Page ids run from 1 to `num_pages`; page 0 is the sink that padded lanes write to and is never handed out.

The list is a LIFO stack in one array: a free page is reused at once, so a stale reference shows up in tests instead of sleeping, and no
call copies more than the pages it names.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rootlet.core.step import IntArray


class PageAllocator:
    """Hands out page ids 1..num_pages. Giving back a page that is already free, foreign or named twice is an AssertionError."""

    __slots__ = ("_is_free", "_seen_at", "_stack", "_top", "num_pages")

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"num_pages {num_pages} < 0"
        self.num_pages = num_pages
        self._stack: IntArray = np.empty(num_pages, dtype=np.int32)
        self._is_free: npt.NDArray[np.bool_] = np.zeros(num_pages + 1, dtype=np.bool_)
        self._seen_at: IntArray = np.zeros(num_pages + 1, dtype=np.int32)  # scratch of the duplicate test in `free`
        self._top = 0
        self.clear()

    @property
    def num_free(self) -> int:
        return self._top

    def alloc(self, n: int) -> IntArray | None:
        """Take `n` pages, which the caller then owns: int32 [n]; None when fewer are free (never a part). O(n)."""
        assert n >= 0, f"cannot take {n} pages"
        if n > self._top:
            return None
        pages = self._stack[self._top - n : self._top][::-1].copy()
        self._top -= n
        self._is_free[pages] = False
        return pages

    def free(self, pages: IntArray) -> None:
        """Give pages back; the caller no longer owns them. O(len(pages)).

        Raises: AssertionError, and nothing changes, when a page is free already, named twice, 0 or beyond the pool.
        """
        n = len(pages)
        if n == 0:
            return
        if n == 1:  # eviction gives pages back one by one; the same tests, without arrays
            page = int(pages[0])
            assert 1 <= page <= self.num_pages, f"C7: pages outside 1..{self.num_pages}: {pages}"
            assert not self._is_free[page], f"C7: double free of pages {pages}"
            self._is_free[page] = True
            self._stack[self._top] = page
            self._top += 1
            return
        assert 1 <= pages.min() <= pages.max() <= self.num_pages, f"C7: pages outside 1..{self.num_pages}: {pages}"
        assert not self._is_free[pages].any(), f"C7: double free of pages {pages[self._is_free[pages]]}"
        order = np.arange(n, dtype=np.int32)
        self._seen_at[pages] = order  # of equal ids only the last write stays, so an earlier one no longer finds its own index
        assert (self._seen_at[pages] == order).all(), f"C7: a page is named twice in one free: {pages}"
        self._is_free[pages] = True
        self._stack[self._top : self._top + n] = pages[::-1]
        self._top += n

    def free_pages(self) -> IntArray:
        """Copy of the free list, int32 [num_free], for checks and dumps."""
        return self._stack[: self._top].copy()

    def clear(self) -> None:
        """Every page is free again, in the order of a fresh allocator. Only when nobody holds one."""
        self._stack[:] = np.arange(self.num_pages, 0, -1, dtype=np.int32)
        self._is_free[1:] = True
        self._top = self.num_pages
