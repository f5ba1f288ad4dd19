"""Keys are bytes (architecture D4): a token id is 4 bytes, little endian, so equality of a whole edge is one memcmp.

Pure functions; nothing is owned here. Offsets and lengths named `*_len` count tokens, others say bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rootlet.core.types import Namespace

UNIT_BYTES = 4
_UNIT = np.dtype("<i4")
_MAX_ID = 2**31 - 1


def pack(ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as little-endian int32 bytes, `len(ids) * 4` long.

    Raises: AssertionError for ids that int32 cannot tell apart, among them the RELAY mark of a token that is still in flight.
    """
    wide = np.asarray(ids, dtype=np.int64)
    assert wide.size == 0 or (wide.min() >= 0 and wide.max() <= _MAX_ID), f"token ids must be in 0..{_MAX_ID}"
    return wide.astype(_UNIT).tobytes()


def unpack(data: bytes) -> npt.NDArray[np.int32]:
    """Inverse of `pack`; a read-only view of `data`."""
    return np.frombuffer(data, dtype=_UNIT)


def floor_len(length: int, page_size: int) -> int:
    """Tokens of `length` that fill whole pages."""
    return length - length % page_size


def num_pages(length: int, page_size: int) -> int:
    """Pages that `length` tokens touch."""
    return -(-length // page_size)


def normalise(namespace: Namespace) -> Namespace:
    """Absent and empty parts are the same: no isolation. The parts stay apart, so ("a", "bc") never meets ("ab", "c")."""
    return Namespace(namespace.lora_id or None, namespace.extra_key or None, namespace.cache_salt or None)


def first_diff(a: bytes, a_offset: int, b: bytes, b_offset: int, *, length: int) -> int:
    """Number of equal leading tokens of a and b from the byte offsets on, looking at `length` tokens."""
    left = np.frombuffer(a, dtype=_UNIT, count=length, offset=a_offset)
    right = np.frombuffer(b, dtype=_UNIT, count=length, offset=b_offset)
    unequal = left != right
    at = int(unequal.argmax()) if length else 0  # argmax is 0 when nothing differs, too: look at that place
    return at if length and unequal[at] else length
