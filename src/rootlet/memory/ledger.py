"""The conservation law of a page pool: free + tree + private = total, at the end of every call.

A snapshot and its check; it owns nothing. The two signs have different causes, so the message names them:

    excess  > 0   some page is counted twice: two owners, the next write corrupts somebody's KV (look for a missing re-point or a double insert)
    deficit < 0   some page is counted nowhere: a leak (look for a path that drops a request without `release`)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """Pages by owner: free list, tree (evictable + protected), private ranges of requests, and `in_flight`: taken for a copy that is not
    done yet. `total` pages of the pool."""

    free: int
    evictable: int
    protected: int
    private: int
    total: int
    in_flight: int = 0

    @property
    def excess(self) -> int:
        """Pages counted more than once (positive) or lost (negative); 0 when the law holds."""
        return self.free + self.evictable + self.protected + self.private + self.in_flight - self.total

    def check(self, law: str = "C1") -> None:
        """Raises: AssertionError with the sum and the meaning of its sign."""
        excess = self.excess
        meaning = "excess: double ownership" if excess > 0 else "deficit: leak"
        assert excess == 0, f"{law}: {excess:+d} pages ({meaning}): {self}"

    def dump(self) -> dict[str, int]:
        """Plain values, for metrics and state dumps. `leaked`: pages that nobody counts; negative when some are counted twice."""
        shown = {"total": self.total, "free": self.free, "evictable": self.evictable, "protected": self.protected, "private": self.private}
        return {**shown, **({"in_flight": self.in_flight} if self.in_flight else {}), "leaked": -self.excess}

    def __str__(self) -> str:
        flying = f" + in flight {self.in_flight}" if self.in_flight else ""
        return f"free {self.free} + evictable {self.evictable} + protected {self.protected} + private {self.private}{flying} of {self.total}"
