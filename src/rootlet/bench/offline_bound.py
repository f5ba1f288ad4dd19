"""What no cache can beat on a trace of block ids: all repeats with unlimited memory, and the best choice of what to keep in a pool (offline).

A block id names a block together with everything before it, as in the public traces, so a block is never used without its predecessors.

The bound for a pool. Between two uses of a block lies an interval; keeping the block through it makes one hit. At each moment only so many
intervals can be open: as many as the pool has pages while nothing runs, and fewer by the request's own pages while one is served. Each hit counts
the same, so the largest set of intervals is found by a sweep that gives up the one that ends last whenever there are too many (Belady's rule,
here with gaps in which a request needs its room). Giving up deeper blocks first among equals keeps what is left a set of prefixes, so the bound is
also what a clairvoyant prefix cache would reach that serves one request at a time. O(n log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: its whole blocks in order, of which the first `num_usable` may come from a cache (the last token is always computed), and the
    pages that it takes while it is served, those of its blocks included."""

    blocks: tuple[int, ...]
    num_usable: int
    num_pages: int

    def __post_init__(self) -> None:
        assert 0 <= self.num_usable <= len(self.blocks) <= self.num_pages, self


def unlimited_hits(visits: Sequence[Visit]) -> int:
    """Blocks found again when nothing is ever forgotten: of each visit the leading ones that were seen before."""
    seen: set[int] = set()
    hits = 0
    for visit in visits:
        hits += sum(block in seen for block in visit.blocks[: visit.num_usable])
        seen.update(visit.blocks)
    return hits


def best_hits(visits: Sequence[Visit], num_pages: int) -> int:
    """Most blocks that any choice of what to keep can find again in a pool of `num_pages`. Visits come one after the other.

    Raises AssertionError for a visit that does not fit the pool alone.
    """
    next_uses = _next_uses(visits)
    kept: dict[int, int] = {}  # block -> number of the visit that will use it
    latest: list[tuple[int, int, int]] = []  # (-end, -depth, block): who is given up first
    hits = 0
    for at, visit in enumerate(visits):
        assert visit.num_pages <= num_pages, f"visit {at} needs {visit.num_pages} pages, the pool has {num_pages}"
        for block in visit.blocks:
            hits += kept.pop(block, -1) == at
        _give_up(kept, latest, num_pages - visit.num_pages)
        for depth, block in enumerate(visit.blocks):
            end = next_uses[at][depth]
            if end is not None:
                kept[block] = end
                heapq.heappush(latest, (-end, -depth, block))
        _give_up(kept, latest, num_pages)
    return hits


def _give_up(kept: dict[int, int], latest: list[tuple[int, int, int]], room: int) -> None:
    while len(kept) > room:
        end, _, block = heapq.heappop(latest)
        if kept.get(block) == -end:
            del kept[block]


def _next_uses(visits: Sequence[Visit]) -> list[list[int | None]]:
    """For each block of each visit, the next visit that has it, None when there is none or it could not be used there."""
    following: dict[int, tuple[int, bool]] = {}
    found: list[list[int | None]] = []
    for at in range(len(visits) - 1, -1, -1):
        visit = visits[at]
        uses = (following.get(block, (0, False)) for block in visit.blocks)
        found.append([end if usable else None for end, usable in uses])
        for depth, block in enumerate(visit.blocks):
            following[block] = (at, depth < visit.num_usable)
    return found[::-1]
