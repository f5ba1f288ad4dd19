"""Every environment variable that is not a config knob (those are ROOTLET_<FIELD>, read by `config/load.py`). The only reader of `os.environ`.

ROOTLET_CHECK=1              costly invariants after every tick
ROOTLET_TEST_EXECUTOR=name   replaces the model by a fake one (`hash_lm`); for process tests only
ROOTLET_TEST_RETRACT=n       retracts somebody every n decode steps; for tests only
ROOTLET_RUNTIME_DIR          where the private socket directory is made; default XDG_RUNTIME_DIR, else the temporary directory;
                             a path too long for a socket is passed over
ROOTLET_CACHE                where fetched models are kept (read in engine/model_source.py)
ROOTLET_CONFIG               TOML file used when no --config is given
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rootlet.core.errors import BadConfig

PREFIX = "ROOTLET_"
MAX_RUNTIME_DIR_BYTES = 70  # a socket's path holds 107: /rootlet-4194304-xxxxxxxx/detokenizer behind it
NOT_KNOBS = frozenset({"ROOTLET_CHECK", "ROOTLET_TEST_EXECUTOR", "ROOTLET_TEST_RETRACT", "ROOTLET_RUNTIME_DIR", "ROOTLET_CACHE", "ROOTLET_CONFIG"})


def environment() -> Mapping[str, str]:
    """The process environment, for the callers that pass it on as a value."""
    return os.environ


def check_enabled(env: Mapping[str, str] | None = None) -> bool:
    return (env if env is not None else os.environ).get("ROOTLET_CHECK", "") not in ("", "0")


def fake_executor(env: Mapping[str, str] | None = None) -> str | None:
    """Name of a fake executor, or None in real life."""
    return (env if env is not None else os.environ).get("ROOTLET_TEST_EXECUTOR") or None


def forced_retraction(env: Mapping[str, str] | None = None) -> int:
    """Decode steps between two forced retractions; 0 in real life."""
    return int((env if env is not None else os.environ).get("ROOTLET_TEST_RETRACT") or 0)


def runtime_dir(env: Mapping[str, str] | None = None) -> Path:
    """Parent of the private socket directory: the first of those named, and of the system's, that can be written and is short enough for a socket's
    path. Raises `BadConfig` when there is none."""
    source = env if env is not None else os.environ
    stated = [source[name] for name in ("ROOTLET_RUNTIME_DIR", "XDG_RUNTIME_DIR") if source.get(name)]
    for path in [*stated, *_temporary(), "/tmp", "/var/tmp"]:
        if len(os.fsencode(path)) <= MAX_RUNTIME_DIR_BYTES and Path(path).is_dir() and os.access(path, os.W_OK):
            return Path(path)
    limit = f"that can be written and whose path has at most {MAX_RUNTIME_DIR_BYTES} bytes"
    raise BadConfig(f"no folder for the server's sockets: set ROOTLET_RUNTIME_DIR to one {limit}")


def _temporary() -> list[str]:
    try:
        return [tempfile.gettempdir()]
    except FileNotFoundError:  # nothing it knows can be written
        return []


def config_file(env: Mapping[str, str] | None = None) -> Path | None:
    """The TOML file to read when the command line names none."""
    stated = (env if env is not None else os.environ).get("ROOTLET_CONFIG")
    return Path(stated).expanduser() if stated else None
