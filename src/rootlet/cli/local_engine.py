"""The engine inside `rootlet chat`, `run` and `batch`: quiet unless a flag says otherwise.

The library's `Engine` leaves logging alone; a command may not.
"""

from __future__ import annotations

from typing import Any

from rootlet.cli.flags import given
from rootlet.core import log
from rootlet.engine.engine import Engine

# What people read in a terminal: at OpenAI's 1 and 1, small models drift off and then fill the whole context.
CALM = {"temperature": 0.7, "top_p": 0.9}


def open_engine(model: str | None, flags: dict[str, Any]) -> Engine:
    """An engine of this process over `model` (None = the default model); use it as a context. Raises `BadConfig`, `BadModelFile`."""
    knobs = {"log_level": "warning", "log_requests": False, **given(flags)}
    log.configure(knobs["log_level"], process="main")
    return Engine(model, **knobs)


def terminal_sampling(engine: Engine, stated: dict[str, Any]) -> dict[str, Any]:
    """`stated`, calmed where neither the command line nor the model's makers say how to sample; `--sampling-defaults openai` leaves it alone."""
    plain = engine.config.server.sampling_defaults == "openai" or "temperature" in stated or engine.manager.sampling_defaults
    return stated if plain else {**CALM, **stated}
