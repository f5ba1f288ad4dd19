"""Requests of one queue that begin alike: let the first one go, so that the others hit the cache in the next pass.

A request whose own match is short is looked up among the beginnings seen in this pass; if it shares enough of one it is put last. Sharing "at
least n tokens with some earlier request" is equality of the first n tokens, so a set of beginnings is exact and no scratch tree is needed.
"""

from __future__ import annotations

from rootlet.core.types import Namespace
from rootlet.scheduler.req import Req

SHORT_MATCH_LEN = 32
SHARED_LEN = 32


class InBatchPrefix:
    """Reset (made new) each pass."""

    def __init__(self, page_size: int) -> None:
        self._shared_len = max(SHARED_LEN, page_size)
        self._seen: set[tuple[Namespace, bytes]] = set()

    def deprioritise(self, req: Req, match_len: int) -> bool:
        """True when `req` should wait for an earlier one of its family; otherwise its beginning is remembered."""
        if match_len > SHORT_MATCH_LEN or req.num_tokens < self._shared_len:
            return False
        beginning = (req.spec.namespace, bytes(req.tokens[: 4 * self._shared_len]))
        if beginning in self._seen:
            return True
        self._seen.add(beginning)
        return False
