"""Which rows of a step read the same leading pages, so that attention may pass over those keys once for several rows (architecture D7).

Owns the answer of the last step, found anew only when the rows change or a page below what they have computed is replaced. Reads page tables; shares
nothing itself: the prefix cache did that. Sharing is counted in whole cuts of the kernels' grid, so a row's bits do not depend on it. Called by
`attention/metadata.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rootlet.core.step import PageDelta

CUT = 128
"""Positions of one cut of the attention kernels' grid."""

MIN_ROWS = 4
"""Fewer rows than this are not grouped: they are better split over the team by cuts."""

I32 = npt.NDArray[np.int32]


class SharedRows(NamedTuple):
    """`members` (batch indices, ascending) whose first `keys` positions, a multiple of `CUT`, lie in the same pages."""

    keys: int
    members: I32


def shared_rows(tables: I32, lens: I32, page_size: int, members: I32 | None = None, keys: int = 0) -> list[SharedRows]:
    """Disjoint groups of the rows of `tables` [B, pages] with `lens` [B] computed positions; `members` are known to share their first `keys`.

    A group is split where smaller groups that share more save more reads. O(B * shared pages).
    """
    if members is None:
        members = np.arange(len(lens), dtype=np.int32)
    next_cut = (keys + CUT) // page_size
    deep = members[lens[members] >= keys + CUT]
    split: list[SharedRows] = []
    if len(deep) >= MIN_ROWS:
        marks, group, counts = np.unique(tables[deep, next_cut - 1], return_inverse=True, return_counts=True)
        for mark in range(len(marks)):
            if counts[mark] < MIN_ROWS:
                continue
            same = deep[group == mark]
            pages = tables[same, : int(lens[same].min()) // CUT * CUT // page_size]
            equal = (pages == pages[0]).all(axis=0)
            common = (len(equal) if equal.all() else int(equal.argmin())) * page_size // CUT * CUT
            if common > keys:
                split += shared_rows(tables, lens, page_size, same, common)
    saved = sum(x.keys * (len(x.members) - 1) for x in split)
    whole = keys * (len(members) - 1)
    return split if saved > whole or whole == 0 else [SharedRows(keys, members)]


class SharedPrefixes:
    """The groups of one executor's current step."""

    __slots__ = ("_computed", "_groups", "_page_size", "_rows")

    def __init__(self, max_rows: int, page_size: int) -> None:
        self._page_size = page_size
        self._computed = np.zeros(max_rows + 1, np.int32)
        self._rows = b""
        self._groups: list[SharedRows] = []

    def find(self, page_table: I32, pool_rows: I32, prefix_lens: I32, extend_lens: I32, deltas: Sequence[PageDelta]) -> list[SharedRows]:
        """Groups among the step's rows of one token; members are batch indices. The table must already hold the deltas."""
        self._computed[:] = 0
        candidates = np.flatnonzero((extend_lens == 1) & (prefix_lens >= CUT)).astype(np.int32)
        if len(candidates) < MIN_ROWS:
            self._rows = b""
            return []
        rows, lens = pool_rows[candidates], prefix_lens[candidates]
        self._computed[rows] = lens
        signature = candidates.tobytes() + rows.tobytes()
        if self.replaced(deltas) or signature != self._rows:
            found = shared_rows(page_table[rows], lens, self._page_size)
            self._groups = [SharedRows(x.keys, candidates[x.members]) for x in found]
            self._rows = signature
        return self._groups

    def replaced(self, deltas: Sequence[PageDelta]) -> bool:
        """Whether `deltas` put other pages below what the candidates of the last `find` had computed: more rows may share now."""
        return any(delta.start_page * self._page_size < self._computed[delta.pool_row] for delta in deltas)
