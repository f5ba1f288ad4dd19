"""The private directory of one server (mode 0700): its sockets and the launch file. Gone when the server ends; left-overs of dead ones are swept.

The name holds the owner's process id, so that the next start can tell a left-over (kill -9) from a neighbour.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rootlet.core.log import logger

PREFIX = "rootlet-"

_log = logger("engine")


def _pid_of(path: Path) -> int | None:
    parts = path.name.split("-")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sweep(parent: Path) -> int:
    """Removes directories of our own user whose server is dead; returns how many."""
    removed = 0
    for path in parent.glob(f"{PREFIX}*-*"):
        pid = _pid_of(path)
        with contextlib.suppress(OSError):
            if pid is not None and not path.is_symlink() and path.is_dir() and path.stat().st_uid == os.getuid() and not _alive(pid):
                shutil.rmtree(path)
                removed += 1
    return removed


@contextlib.contextmanager
def private_dir(parent: Path) -> Iterator[Path]:
    """A fresh directory only its owner can enter; removed with all it holds."""
    removed = sweep(parent)
    if removed:
        _log.info("stale_directories_removed", count=removed)
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
