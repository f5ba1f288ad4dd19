"""Standard streams that are closed (`>&-`, some supervisors) or lie on a full disk: no abort, no traceback, and no number given to a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device on this system")]


def rootlet(redirection: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`rootlet ARGUMENTS REDIRECTION`, over HashLM."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "rootlet.cli.main", *arguments]
    known = {**os.environ, "ROOTLET_TEST_EXECUTOR": "hash_lm", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(shell, capture_output=True, text=True, env=known, stdin=subprocess.DEVNULL, timeout=60.0, check=False)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_as_the_null_device(closed: str) -> None:
    for arguments in (("version",), ("run", "--prompt", "hi", "--max-tokens", "4", "--ctx-len", "64")):
        plain, done = rootlet("", *arguments), rootlet(closed, *arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        if arguments == ("version",):
            assert plain.stdout
            assert done.stdout == ("" if ">&-" in closed.split() else plain.stdout)


@pytest.mark.parametrize("arguments", [("version",), ("serve", "--help"), ("serve", "--print-config"), ("run", "--prompt", "hi", "--ctx-len", "64")])
def test_output_onto_a_full_disk_is_one_line_and_a_1(arguments: tuple[str, ...]) -> None:
    done = rootlet(">/dev/full", *arguments)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("rootlet: cannot write")] == [done.stderr.splitlines()[-1]]
    assert "Traceback" not in done.stderr
    assert rootlet(">/dev/full 2>/dev/full", *arguments).returncode == 1


def test_a_server_that_cannot_say_where_it_is_leaves_nothing_behind(tmp_path: Path) -> None:
    done = rootlet(">/dev/full", "serve", "--port", "0", "--ctx-len", "64", ROOTLET_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "rootlet: cannot write: No space left on device")
    assert list(tmp_path.iterdir()) == []
