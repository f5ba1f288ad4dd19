"""Derives command-line flags from `config/schema.py`: one keyword per knob, None = not given. Decides nothing about values (config/load.py does)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, get_type_hints

import cyclopts

from rootlet.config.load import Knob, knobs
from rootlet.core.errors import InvalidValue
from rootlet.core.sampling_params import MAX_TEMPERATURE

Command = Callable[..., Any]

# What an engine without a server can use of the server's section.
LOCAL = frozenset({"sampling_defaults", "log_level", "log_requests"})


def _annotation(knob: Knob) -> Any:
    kind = Literal[knob.choices] if knob.choices else knob.type
    limits = [f"{word} {limit:g}" for limit, word in ((knob.low, "at least"), (knob.high, "at most")) if limit is not None]
    default = "" if knob.default is None else f"default {knob.default}"
    notes = ", ".join(filter(None, [knob.unit, *limits, default]))
    text = knob.help + (f" [{notes}]" if notes else "")
    return Annotated[kind | None, cyclopts.Parameter(help=text, group=knob.section.capitalize(), show_default=False)]


def with_knobs(*, server: Collection[str] | None = None) -> Callable[[Command], Command]:
    """Give `function(..., **flags)` a keyword for every knob, so that cyclopts parses and documents them. Own parameters come first.

    `server`: the knobs of the server's section that the command can use, None = all; it does not know the others, so none is ignored.
    """

    def _decorate(function: Command) -> Command:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        hints = get_type_hints(function, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in own]
        taken = {p.name for p in own}
        extra = [
            inspect.Parameter(knob.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(knob))
            for knob in knobs().values()
            if knob.name not in taken and (knob.section != "server" or server is None or knob.name in server)
        ]
        parameters = sorted([*own, *extra], key=lambda p: p.kind)
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return _decorate


def check_temperature(temperature: float | None) -> None:
    """The range of the chat routes, for the terminal, before anything is loaded: far above it answers are noise as long as the context."""
    if temperature is not None and not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidValue("temperature", f"--temperature must be in [0, {MAX_TEMPERATURE:g}], got {temperature:g}")


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Only the flags that the user wrote."""
    return {name: value for name, value in flags.items() if value is not None}
