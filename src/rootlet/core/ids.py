"""Names and seeds that the server makes up: the only place (with `clock`) where chance enters (architecture D15).

Called by the front. Inject another `IdSource` to replay a log. Does not check uniqueness: the front's table does.
"""

from __future__ import annotations

import secrets
import uuid
from typing import Protocol

SEED_BITS = 63
RID_CHARS = r"A-Za-z0-9._:\-"
"""Of an id that a client chooses, as the inside of a character class; at most `MAX_RID_CHARS` of them."""
MAX_RID_CHARS = 128
MAX_WIRE_RID_CHARS = MAX_RID_CHARS + 16
"""With what the server appends for the prompts of a batch and the choices of a prompt."""


class IdSource(Protocol):
    def rid(self) -> str: ...

    def seed(self) -> int: ...


class RandomIds:
    """`rid` is unguessable, so that one client cannot abort another's request; `seed` is uniform in [0, 2**63)."""

    def rid(self) -> str:
        return uuid.uuid4().hex

    def seed(self) -> int:
        return secrets.randbits(SEED_BITS)


class CountingIds:
    """Deterministic, for replays and tests: r0, r1, ... and seeds 1, 2, ..."""

    def __init__(self) -> None:
        self._num_rids = 0
        self._num_seeds = 0

    def rid(self) -> str:
        self._num_rids += 1
        return f"r{self._num_rids - 1}"

    def seed(self) -> int:
        self._num_seeds += 1
        return self._num_seeds
