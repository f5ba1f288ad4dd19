"""Counts what a JSON body will be made of while its bytes arrive, and refuses it before anything is made: many tiny values multiply a body's memory
(three bytes of `[],` become 64), and the parser holds up everybody else while it makes them.

Counts outside strings only, so a long text may hold as many commas as it likes. No parser: what it counts in bytes that are no JSON means nothing,
and the parser refuses those. Called by `body.py` for each part that arrives; O(bytes), in C.
"""

from __future__ import annotations

from rootlet.core.errors import TooLarge

MAX_VALUES = 2**22
"""Commas: as many token ids in one request, say."""
MAX_CONTAINERS = 2**18
MAX_STRINGS = 2**20
"""Keys are strings too."""


class Census:
    """Of one body. Raises `TooLarge` from `add` as soon as there is too much of anything."""

    __slots__ = ("_backslash", "_in_string", "_num_commas", "_num_containers", "_num_quotes")

    def __init__(self) -> None:
        self._in_string = False
        self._backslash = b""  # an escape that the last part ended in the middle of
        self._num_commas = self._num_containers = self._num_quotes = 0

    def add(self, part: bytes) -> None:
        """The next bytes of the body."""
        text = self._backslash + part
        whole = text.rstrip(b"\\")
        num_backslashes = len(text) - len(whole)  # pairs of them are whole escapes
        self._backslash = b"\\" * (num_backslashes % 2)
        pieces = whole.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[int(self._in_string) :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        self._num_quotes += len(pieces) - 1
        self._num_commas += outside.count(b",")
        self._num_containers += outside.count(b"[") + outside.count(b"{")
        self._check(self._num_commas, MAX_VALUES, "values")
        self._check(self._num_containers, MAX_CONTAINERS, "arrays and objects")
        self._check(self._num_quotes // 2, MAX_STRINGS, "strings and keys")

    def _check(self, num: int, most: int, what: str) -> None:
        if num > most:
            raise TooLarge(f"the request body holds more than {most:,} {what}; send them in several requests")
