"""The bounds of `make bench-trace` against all choices there are, and by hand."""

from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from rootlet.bench.offline_bound import Visit, best_hits, unlimited_hits


def visit(*blocks: int, spare: int = 0, usable: int | None = None) -> Visit:
    return Visit(blocks, len(blocks) if usable is None else usable, len(blocks) + spare)


def brute_force(visits: list[Visit], num_pages: int) -> int:
    """Tries every set of blocks to keep after and during each visit."""

    @cache
    def best(at: int, kept: frozenset[int]) -> int:
        if at == len(visits):
            return 0
        now = visits[at]
        hits = sum(block in kept for block in now.blocks[: now.num_usable])
        others = kept - set(now.blocks)
        room = num_pages - now.num_pages
        most = 0
        for size in range(min(room, len(others)) + 1):
            for stay in combinations(sorted(others), size):
                there = set(stay) | set(now.blocks)
                for keep in range(min(num_pages, len(there)) + 1):
                    most = max([most, *(best(at + 1, frozenset(some)) for some in combinations(sorted(there), keep))])
        return hits + most

    return best(0, frozenset())


# A block names what stands before it, so prompts are paths of this tree: 1 > 2 > 3, 1 > 4, 5 > 6.
PATHS = ((1,), (1, 2), (1, 2, 3), (1, 4), (5,), (5, 6))


@st.composite
def traces(draw: st.DrawFn) -> list[Visit]:
    found = []
    for _ in range(draw(st.integers(1, 6))):
        path = draw(st.sampled_from(PATHS))
        found.append(Visit(path, draw(st.integers(max(0, len(path) - 1), len(path))), len(path) + draw(st.integers(0, 1))))
    return found


@given(traces(), st.integers(4, 6))
def test_no_choice_of_what_to_keep_finds_more_and_one_finds_as_much(visits: list[Visit], num_pages: int) -> None:
    assert best_hits(visits, num_pages) == brute_force(visits, num_pages)


@given(traces())
def test_a_pool_for_everything_is_unlimited(visits: list[Visit]) -> None:
    assert best_hits(visits, sum(each.num_pages for each in visits)) == unlimited_hits(visits)


def test_by_hand() -> None:
    """1 2 | 5 6 | 1 2 | 5 6 in four pages keeps all four blocks; in three it keeps one of the pair that it is not serving."""
    visits = [visit(1, 2), visit(5, 6), visit(1, 2), visit(5, 6)]
    assert unlimited_hits(visits) == 4
    assert best_hits(visits, 4) == 4
    assert best_hits(visits, 3) == 2
    assert best_hits(visits, 2) == 0


def test_the_last_token_is_always_computed() -> None:
    """The same prompt again, of exactly two blocks: only the first can be used; a third time likewise."""
    again = [visit(1, 2, usable=1)] * 3
    assert (unlimited_hits(again), best_hits(again, 4)) == (2, 2)


def test_what_a_request_needs_beside_its_blocks_is_not_there_for_others() -> None:
    visits = [visit(1), visit(5, spare=2), visit(1)]
    assert best_hits(visits, 4) == 1
    assert best_hits(visits, 3) == 0
