"""Structured log lines: `event key=value`, one line an event, always with a rid or a step where there is one.

info = life cycle only; debug = one line a step; never in per-token loops. Client text, API keys and prompts are never logged.
`configure` is called once by each process main; libraries call `logger(name)` only.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_ROOT = "rootlet"
_MAX_VALUE_CHARS = 500


def _value(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if len(text) > _MAX_VALUE_CHARS:
        text = text[:_MAX_VALUE_CHARS] + "..."
    # A newline inside a value would let a client forge log lines.
    plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if plain else '"' + text.encode("unicode_escape").decode("ascii").replace('"', "'") + '"'


class Log:
    """Thin front of `logging`: keyword fields instead of format strings."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{name}")

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", " ".join([event, *(f"{k}={_value(v)}" for k, v in fields.items())]))

    def debug(self, event: str, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """As `error`, with the traceback of the exception being handled. For process mains."""
        self._logger.error("%s", " ".join([event, *(f"{k}={_value(v)}" for k, v in fields.items())]), exc_info=True)


def logger(name: str) -> Log:
    return Log(name)


def configure(level: str, *, process: str, stream: TextIO | None = None) -> None:
    """Send the lines of this process to `stream` (stderr), marked with the process's name. Calling it again replaces the former setting."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname).1s {process} %(message)s", "%H:%M:%S"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
