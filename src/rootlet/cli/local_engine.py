"""The engine inside `rootlet chat`, `run` and `batch`: quiet unless a flag says otherwise.

The library's `Engine` leaves logging alone; a command may not.
"""

from __future__ import annotations

from typing import Any

from rootlet.cli.flags import given
from rootlet.core import log
from rootlet.engine.engine import Engine


def open_engine(model: str | None, flags: dict[str, Any]) -> Engine:
    """An engine of this process over `model` (None = the default model); use it as a context. Raises `BadConfig`, `BadModelFile`."""
    knobs = {"log_level": "warning", "log_requests": False, **given(flags)}
    log.configure(knobs["log_level"], process="main")
    return Engine(model, **knobs)
