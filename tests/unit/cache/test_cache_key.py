"""Keys as bytes: packing, comparing, flooring, namespaces."""

import numpy as np
import pytest

from rootlet.cache import key as keys
from rootlet.core.types import Namespace


def test_pack_is_little_endian_int32_and_unpack_its_inverse() -> None:
    assert keys.pack([1, 258, 2**31 - 1]) == b"\x01\x00\x00\x00\x02\x01\x00\x00\xff\xff\xff\x7f"
    assert keys.unpack(keys.pack(np.array([5, 6], dtype=np.int64))).tolist() == [5, 6]
    assert keys.pack([]) == b""


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
def test_ids_that_int32_cannot_tell_apart_are_refused(bad: int) -> None:
    with pytest.raises(AssertionError, match="token ids"):
        keys.pack([1, bad])


@pytest.mark.parametrize("at", [0, 1, 5, 8])
def test_first_diff_finds_the_first_unequal_token_at_any_offset(at: int) -> None:
    left = list(range(100, 108))
    right = [*left[:at], *[7] * (8 - at)]
    a, b = keys.pack([1, *left]), keys.pack([2, 3, *right])
    assert keys.first_diff(a, 4, b, 8, length=8) == at


def test_first_diff_compares_tokens_and_not_bytes() -> None:
    assert keys.first_diff(keys.pack([0x010000]), 0, keys.pack([0x020000]), 0, length=1) == 0
    assert keys.first_diff(keys.pack([3]), 0, keys.pack([3]), 0, length=0) == 0


@pytest.mark.parametrize(("length", "page", "floor", "pages"), [(0, 4, 0, 0), (3, 4, 0, 1), (4, 4, 4, 1), (9, 4, 8, 3), (5, 1, 5, 5)])
def test_page_arithmetic(length: int, page: int, floor: int, pages: int) -> None:
    assert keys.floor_len(length, page) == floor
    assert keys.num_pages(length, page) == pages


def test_empty_and_absent_namespace_parts_are_the_same() -> None:
    assert keys.normalise(Namespace("", None, "")) == Namespace()
    assert keys.normalise(Namespace("a", "", "s")) == Namespace("a", None, "s")
