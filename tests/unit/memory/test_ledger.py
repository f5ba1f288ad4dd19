"""Ledger: the law, and a message that tells a leak from double ownership."""

import pytest

from rootlet.memory.ledger import Ledger


def test_a_balanced_ledger_passes() -> None:
    Ledger(free=3, evictable=2, protected=1, private=4, total=10).check()


@pytest.mark.parametrize(("free", "words"), [(5, r"C1: \+2 pages \(excess: double ownership\)"), (1, r"C1: -2 pages \(deficit: leak\)")])
def test_the_sign_says_what_went_wrong(free: int, words: str) -> None:
    with pytest.raises(AssertionError, match=words + r": free \d \+ evictable 2 \+ protected 1 \+ private 4 of 10"):
        Ledger(free=free, evictable=2, protected=1, private=4, total=10).check()
