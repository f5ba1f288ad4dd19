"""Strict readers for the fields of a JSON object: a boolean is no integer, a string is no number, null is the default.

Every refusal is an `InvalidValue` that names the path of the field, the value (capped) and what is allowed. Unknown fields are nobody's business
here: who does not ask for a field ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from rootlet.core.errors import InvalidValue
from rootlet.server.errors import show


def check_ids(value: object, param: str, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids, each in [0, vocab_size). O(ids), in C for the common case."""
    if not isinstance(value, list):
        raise InvalidValue(param, f"{param} must be a list of token ids, got {show(value)}")
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= vocab_size):
        for i, item in enumerate(value):
            if type(item) is not int:
                raise InvalidValue(f"{param}[{i}]", f"{param}[{i}] must be a token id (an integer), got {show(item)}")
            if not 0 <= item < vocab_size:
                limit = f"outside the vocabulary of {vocab_size} tokens (0..{vocab_size - 1})"
                raise InvalidValue(f"{param}[{i}]", f"{param}[{i}] is token id {show(item)}, {limit}")
    return tuple(value)


class Fields:
    """A JSON object and where it stands in the body. Does not copy it."""

    __slots__ = ("data", "path")

    def __init__(self, data: dict[str, Any], path: str = "") -> None:
        self.data = data
        self.path = path

    def param(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        return self.data.get(name)

    def refuse(self, name: str, wanted: str) -> InvalidValue:
        param = self.param(name)
        return InvalidValue(param, f"{param} must be {wanted}, got {show(self.data.get(name))}")

    def present(self, *names: str) -> str | None:
        """The first of `names` that is set to something else than null."""
        return next((name for name in names if self.data.get(name) is not None), None)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def integer(self, name: str, *, low: int | None = None, high: int | None = None, knob: str = "") -> int | None:
        value = self.data.get(name)
        if value is None:
            return None
        limits = f"an integer{_range(low, high)}{f' (limit: {knob})' if knob else ''}"
        if type(value) is not int or (low is not None and value < low) or (high is not None and value > high):
            raise self.refuse(name, limits)
        return value

    def number(self, name: str, *, low: float | None = None, high: float | None = None) -> float | None:
        value = self.data.get(name)
        if value is None:
            return None
        bad = type(value) not in (int, float) or not math.isfinite(value)
        if bad or (low is not None and value < low) or (high is not None and value > high):
            raise self.refuse(name, f"a finite number{_range(low, high)}")
        return float(value)

    def string(self, name: str, *, max_chars: int | None = None, choices: Collection[str] | None = None) -> str | None:
        value = self.data.get(name)
        if value is None:
            return None
        if choices is not None and not (isinstance(value, str) and value in choices):
            raise self.refuse(name, "one of " + ", ".join(sorted(choices)))
        if not isinstance(value, str) or (max_chars is not None and len(value) > max_chars):
            raise self.refuse(name, "a string" + (f" of at most {max_chars} characters" if max_chars is not None else ""))
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """One string or a list of them; absent = none."""
        value = self.data.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a string or a list of strings")
        return tuple(value)

    def object(self, name: str) -> Fields | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Fields(value, self.param(name))

    def array(self, name: str) -> list[Any] | None:
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(name, "a list")
        return value

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...] | None:
        value = self.data.get(name)
        return None if value is None else check_ids(value, self.param(name), vocab_size)


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f" >= {low:g}"
    if low is None:
        return f" <= {high:g}"
    return f" in [{low:g}, {high:g}]"
