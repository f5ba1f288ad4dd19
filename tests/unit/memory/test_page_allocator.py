"""PageAllocator: exact counts, LIFO reuse, and refusal of every wrong free without a change."""

import numpy as np
import pytest

from rootlet.memory.page_allocator import PageAllocator


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_a_fresh_allocator_hands_out_1_to_n_and_never_0() -> None:
    allocator = PageAllocator(5)
    taken = allocator.alloc(5)
    assert taken is not None
    assert taken.dtype == np.int32
    assert taken.tolist() == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0


def test_a_short_pool_gives_nothing_rather_than_a_part() -> None:
    allocator = PageAllocator(3)
    assert allocator.alloc(4) is None
    assert allocator.num_free == 3
    assert len(allocator.alloc(0)) == 0


def test_the_page_freed_last_is_reused_first() -> None:
    allocator = PageAllocator(8)
    allocator.alloc(8)
    allocator.free(pages(3, 7))
    allocator.free(pages(5))
    assert allocator.alloc(3).tolist() == [5, 3, 7]


def test_what_is_returned_is_the_callers_copy() -> None:
    allocator = PageAllocator(4)
    first = allocator.alloc(2)
    first[:] = 0
    assert sorted(allocator.alloc(2).tolist()) == [3, 4]
    assert allocator.free_pages().tolist() == []


@pytest.mark.parametrize(
    "wrong", [(2, 3), (1, 1), (0,), (9,), (-1,)], ids=["already free", "twice in one call", "page 0", "beyond the pool", "negative"]
)
def test_a_wrong_free_is_an_assertion_and_changes_nothing(wrong: tuple[int, ...]) -> None:
    allocator = PageAllocator(8)
    allocator.alloc(3)
    allocator.free(pages(3))
    before = allocator.free_pages().tolist()
    with pytest.raises(AssertionError, match="C7"):
        allocator.free(pages(*wrong))
    assert allocator.free_pages().tolist() == before


def test_clear_is_a_fresh_allocator() -> None:
    allocator = PageAllocator(4)
    allocator.alloc(3)
    allocator.free(pages(2))
    allocator.clear()
    assert allocator.free_pages().tolist() == PageAllocator(4).free_pages().tolist()
    allocator.alloc(4)
    allocator.free(pages(1, 2, 3, 4))


def test_random_use_keeps_the_pool_a_partition() -> None:
    rng = np.random.default_rng(0)
    allocator, held = PageAllocator(50), set()
    for _ in range(300):
        if rng.random() < 0.5 and held:
            back = rng.permutation(sorted(held))[: rng.integers(1, len(held) + 1)]
            allocator.free(back.astype(np.int32))
            held -= set(back.tolist())
        elif (taken := allocator.alloc(int(rng.integers(0, 12)))) is not None:
            assert held.isdisjoint(taken.tolist())
            held |= set(taken.tolist())
        assert sorted([*held, *allocator.free_pages().tolist()]) == list(range(1, 51))
