"""A named choice: policy, eviction order, attention backend, model family... An unknown name is an error that lists the near ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rootlet.core.errors import BadConfig

T = TypeVar("T")


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
            near = difflib.get_close_matches(name, self._items, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BadConfig(f"unknown {self._what} {name!r}{hint} (known: {', '.join(sorted(self._items))})")
        return self._items[name]

    def names(self) -> list[str]:
        return sorted(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: str) -> bool:
        return name in self._items
