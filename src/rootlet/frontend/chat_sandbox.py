"""The jinja sandbox for chat templates: transformers' dialect, and bounds on time and size.

A template comes with a model from somewhere, so it is untrusted: it cannot reach Python internals (jinja's sandbox), and loops, macro
calls, products and concatenations are charged to a budget, since jinja itself bounds only `range`. Called by `frontend.chat_template`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rootlet.core.errors import BadModelFile, TemplateError

_TICK = "_rootlet_tick"
_JOIN = "_rootlet_join"
_TICKS_PER_LOOK = 256
_RUNTIME_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """`cpu_s`: CPU time of one render. `output_len`: characters of the prompt, and of any single value on the way."""

    cpu_s: float = 5.0
    output_len: int = 32_000_000


class _Budget:
    """What one render may still use; lives in a context variable while it runs."""

    __slots__ = ("_deadline", "_ticks", "limits")

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self._ticks = 0
        self._deadline = time.thread_time() + limits.cpu_s

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK == 0 and time.thread_time() > self._deadline:
            raise TemplateError(f"The chat template ran for more than {self.limits.cpu_s} s of CPU time and was stopped.")

    def check_size(self, size: int) -> None:
        if size > self.limits.output_len:
            raise TemplateError(f"The chat template makes a value of {size} items; the limit is {self.limits.output_len}.")


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


def _tick() -> str:
    _budget.get().tick()
    return ""


def _join(*values: Any) -> str:
    text = "".join(map(str, values))
    _budget.get().check_size(len(text))
    return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Unlike jinja's own, no HTML escapes: the text is for a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body without its tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with charged loops, macros, products and concatenations."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse an operation whose result would be huge before it is made."""
        budget = _budget.get()
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(sized, str | list | tuple):
                    budget.check_size(len(sized) * max(times, 0))
        elif operator == "**" and (not isinstance(right, int | float) or abs(right) > 64 or abs(left) > 1e6):
            raise TemplateError("The chat template raises a number to a power beyond 64.")
        elif operator == "%" and isinstance(left, str):
            budget.check_size(len(left))
            _refuse_wide_format(left)
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, str | list | tuple):
            budget.check_size(len(result))
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _charge(super()._parse(source, name, filename))


def _refuse_wide_format(pattern: str) -> None:
    digits = "".join(c if c.isdigit() else " " for c in pattern).split()
    if any(len(d) > 4 for d in digits):
        raise TemplateError("The chat template formats to a width beyond 9999.")


def _charge(tree: nodes.Template) -> nodes.Template:
    """Put a tick at the head of every loop body and macro body, and make `~` go through `_join`."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))  # type: ignore[attr-defined]
    _replace_concats(tree)
    return tree


def _replace_concats(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_replaced(item) for item in value])
        else:
            setattr(node, field, _replaced(value))


def _replaced(item: Any) -> Any:
    if not isinstance(item, nodes.Node):
        return item
    _replace_concats(item)
    if isinstance(item, nodes.Concat):
        return nodes.Call(nodes.Name(_JOIN, "load"), item.nodes, [], None, None).set_lineno(item.lineno)
    return item


def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    env.filters["tojson"] = _tojson
    charged: dict[str, Callable[..., Any]] = {_TICK: _tick, _JOIN: _join}
    env.globals.update(charged, raise_exception=_raise_exception, strftime_now=_strftime_now)
    env.globals.pop("lipsum")
    return env


class CompiledTemplate:
    """A template ready to render, bounded by `limits`."""

    def __init__(self, source: str, limits: RenderLimits) -> None:
        """Raises: BadModelFile with line and reason if `source` does not compile."""
        self._limits = limits
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadModelFile(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise BadModelFile("chat template: nested too deeply.") from error

    def render(self, variables: dict[str, Any], *, cpu_s: float | None = None) -> str:
        """The text for `variables`; `cpu_s` lowers the limit for this render.

        Raises: TemplateError with the template's own words, or saying which bound it broke.
        """
        limits = self._limits if cpu_s is None else replace(self._limits, cpu_s=min(cpu_s, self._limits.cpu_s))
        token = _budget.set(_Budget(limits))
        try:
            return self._collect(variables)
        except jinja2.TemplateError as error:
            raise TemplateError(str(error.message or error)) from error
        except _RUNTIME_ERRORS as error:
            raise TemplateError(f"The chat template failed on these messages ({type(error).__name__}: {error}).") from error
        finally:
            _budget.reset(token)

    def _collect(self, variables: dict[str, Any]) -> str:
        budget, size, pieces = _budget.get(), 0, []
        for piece in self._template.generate(variables):
            size += len(piece)
            budget.check_size(size)
            budget.tick()
            pieces.append(piece)
        return "".join(pieces)
