"""Stop strings in a growing text: an Aho-Corasick automaton (Aho and Corasick, 1975) that says what may be given out already.

Held back is exactly the longest suffix that is a proper prefix of some stop string, so `Condor` flows although `Conclusion` is a stop.
The match that ends earliest wins; stops that end at the same character: the one listed first. Knows nothing of tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

_NO_STOP = -1


@dataclass(slots=True)
class _Node:
    """`fail` = longest proper suffix that is also in the trie; `best` = first listed stop that ends here; `hold` = characters to keep back."""

    depth: int
    next: dict[str, int] = field(default_factory=dict)
    fail: int = 0
    best: int = _NO_STOP
    hold: int = 0


def _grow(stops: tuple[str, ...]) -> list[_Node]:
    nodes = [_Node(0)]
    for order, stop in enumerate(stops):
        at = 0
        for char in stop:
            if char not in nodes[at].next:
                nodes[at].next[char] = len(nodes)
                nodes.append(_Node(nodes[at].depth + 1))
            at = nodes[at].next[char]
        if nodes[at].best == _NO_STOP:
            nodes[at].best = order
    return nodes


def _earlier(a: int, b: int) -> int:
    if _NO_STOP in (a, b):
        return max(a, b)
    return min(a, b)


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> list[_Node]:
    """Breadth first, so that a node's suffix link is complete before the node is reached. O(total characters)."""
    nodes = _grow(stops)
    todo = deque([0])
    while todo:
        at = todo.popleft()
        node = nodes[at]
        # A node without children is no proper prefix of anything: what may still grow is a suffix of it.
        node.hold = node.depth if node.next and at else nodes[node.fail].hold
        if at:
            node.best = _earlier(node.best, nodes[node.fail].best)
        for char, child in node.next.items():
            nodes[child].fail = _step(nodes, node.fail, char) if at else 0
            todo.append(child)
    return nodes


def _step(nodes: list[_Node], at: int, char: str) -> int:
    while True:
        child = nodes[at].next.get(char)
        if child is not None:
            return child
        if at == 0:
            return 0
        at = nodes[at].fail


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`start`, `end`: character offsets of the stop in the whole text. `cut` = where the text given to the client ends."""

    stop: str
    start: int
    end: int
    cut: int


class StopMatcher:
    """Feeds on text, gives out what is certain. After a match it must not be fed any more.

    `released` counts characters given out; `match` is set once.
    """

    __slots__ = ("_at", "_include_stop", "_nodes", "_num_chars", "_pending", "_stops", "match", "released")

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        assert all(stops), "empty stop strings are refused at the front"
        self._stops = stops
        self._nodes = _automaton(stops)
        self._include_stop = include_stop
        self._at = 0
        self._num_chars = 0
        self._pending = ""
        self.released = 0
        self.match: StopMatch | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The next piece of text -> what may be given out. Not `armed` (min_new_tokens not reached): a stop that ends in it is ignored."""
        assert self.match is None
        at, nodes = self._at, self._nodes
        for offset, char in enumerate(text):
            at = _step(nodes, at, char)
            if armed and nodes[at].best != _NO_STOP:
                return self._end(self._stops[nodes[at].best], self._num_chars + offset + 1, text)
        self._at = at
        self._num_chars += len(text)
        self._pending += text
        return self._release(len(self._pending) - nodes[at].hold)

    def flush(self) -> str:
        """The text has ended without a stop: everything that was held back."""
        return self._release(len(self._pending))

    def _end(self, stop: str, end: int, text: str) -> str:
        start = end - len(stop)
        cut = end if self._include_stop else start
        self.match = StopMatch(stop, start, end, cut)
        self._pending += text
        return self._release(cut - self.released)

    def _release(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        self.released += len(text)
        return text
