"""The private directory: only ours, gone afterwards, left-overs of the dead swept and of the living left."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from rootlet.engine.private_dir import private_dir, sweep


def _dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_row_92_only_the_owner_enters_and_nothing_is_left(tmp_path: Path) -> None:
    with private_dir(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_left_overs_of_dead_servers_are_swept(tmp_path: Path) -> None:
    stale = tmp_path / f"rootlet-{_dead_pid()}-abc"
    live, other = tmp_path / f"rootlet-{os.getpid()}-abc", tmp_path / "rootlet-notes-old"
    for path in (stale, live, other):
        path.mkdir()
    (stale / "main").touch()
    assert sweep(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([live.name, other.name])


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / f"rootlet-{_dead_pid()}-abc").symlink_to(target)
    assert sweep(tmp_path) == 0
    assert target.is_dir()
