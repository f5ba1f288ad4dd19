"""Where the sockets lie: a folder that can be written, and whose path leaves room for theirs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootlet.core import env
from rootlet.core.errors import BadConfig
from rootlet.engine.private_dir import private_dir
from rootlet.engine.processes import ROLES
from rootlet.ipc.channel_zmq import address

SUN_PATH = 107  # bytes of a Linux socket's path, from unix(7)


def of_length(parent: Path, num_bytes: int) -> Path:
    """A folder below `parent` whose path has `num_bytes`."""
    path = parent / ("x" * (num_bytes - len(os.fsencode(parent)) - 1))
    path.mkdir()
    return path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short path, of which the module knows as of the system's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: path)
        yield Path(path)


def test_the_longest_folder_that_is_taken_holds_every_socket(short: Path) -> None:
    longest = of_length(short, env.MAX_RUNTIME_DIR_BYTES)
    assert env.runtime_dir({"ROOTLET_RUNTIME_DIR": str(longest)}) == longest
    with private_dir(longest) as directory:
        digits = len("4194304") - len(str(os.getpid()))  # as many as a process id has at most
        assert max(len(address(directory, role)) for role in ("main", *ROLES)) - len("ipc://") + digits <= SUN_PATH


def test_what_is_too_long_or_not_there_is_passed_over(short: Path) -> None:
    longer = of_length(short, env.MAX_RUNTIME_DIR_BYTES + 1)
    umlauts = short / ("ü" * ((env.MAX_RUNTIME_DIR_BYTES - len(str(short))) // 2 + 1))  # short in characters, not in bytes
    umlauts.mkdir()
    for bad in (longer, umlauts, short / "none"):
        assert env.runtime_dir({"ROOTLET_RUNTIME_DIR": str(bad)}) == short
        assert env.runtime_dir({"ROOTLET_RUNTIME_DIR": str(bad), "XDG_RUNTIME_DIR": "/dev/shm"}) == Path("/dev/shm")


def test_a_temporary_directory_that_is_too_long_or_missing_falls_back(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = of_length(short, env.MAX_RUNTIME_DIR_BYTES + 1)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(longer))
    assert env.runtime_dir({}) == Path("/tmp")

    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert env.runtime_dir({}) == Path("/tmp")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BadConfig, match="set ROOTLET_RUNTIME_DIR"):
        env.runtime_dir({})
