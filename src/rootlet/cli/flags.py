"""Derives command-line flags from `config/schema.py`: one keyword per knob, None = not given. Decides nothing about values (config/load.py does)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_type_hints

import cyclopts

from rootlet.config.schema import RuntimeConfig


def knobs() -> Iterator[tuple[str, Field[Any], Any]]:
    """(section, field, type) of every knob, in the order of the schema."""
    for section in fields(RuntimeConfig):
        args = getattr(RuntimeConfig(), section.name)
        hints = get_type_hints(type(args))
        for item in fields(args):
            yield section.name, item, hints[item.name]


def _annotation(section: str, item: Field[Any], hint: Any) -> Any:
    choices = item.metadata["choices"]
    kind = Literal[choices] if choices else hint
    limits = [f"{word} {item.metadata[key]:g}" for key, word in (("low", "at least"), ("high", "at most")) if item.metadata[key] is not None]
    default = "" if item.default is None else f"default {item.default}"
    notes = ", ".join(filter(None, [item.metadata["unit"], *limits, default]))
    text = item.metadata["help"] + (f" [{notes}]" if notes else "")
    return Annotated[kind | None, cyclopts.Parameter(help=text, group=section.capitalize(), show_default=False)]


def with_knobs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `function(..., **flags)` a keyword for every knob, so that cyclopts parses and documents them. Own parameters come first."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = get_type_hints(function, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in own]
    taken = {p.name for p in own}
    extra = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(section, item, hint))
        for section, item, hint in knobs()
        if item.name not in taken
    ]
    parameters = sorted([*own, *extra], key=lambda p: p.kind)
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Only the flags that the user wrote."""
    return {name: value for name, value in flags.items() if value is not None}
