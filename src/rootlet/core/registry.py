"""A named choice: policy, eviction order, attention backend, model family... An unknown name is an error that lists the near ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from rootlet.core.errors import BadConfig

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str], *, show: Callable[[str], str] = repr) -> str:
    """ "; did you mean X?" with the nearest of `known`, or nothing: the end of a message about an unknown name."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {show(near[0])}?" if near else ""


class Registry(Generic[T]):
    def __init__(self, what: str) -> None:
        self._what = what
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Registering a name twice is a bug."""

        def add(item: T) -> T:
            assert name not in self._items, f"{self._what} {name!r} registered twice"
            self._items[name] = item
            return item

        return add

    def get(self, name: str) -> T:
        """Raises `BadConfig` with the known names when `name` is unknown."""
        if name not in self._items:
            raise BadConfig(f"unknown {self._what} {name!r}{did_you_mean(name, self._items)} (known: {', '.join(sorted(self._items))})")
        return self._items[name]

    def names(self) -> list[str]:
        return sorted(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: str) -> bool:
        return name in self._items
