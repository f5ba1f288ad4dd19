"""Ctrl-C in commands that hold an engine: an answer ends, or the command, never with a traceback and never with a request left running."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures.granted import Granted

pytestmark = pytest.mark.process

DEADLINE_S = 120.0  # so that nothing hangs; no promise
FOUR_SAMPLED = rb"[\s\S]{4}"  # HashLM samples any character, newlines too


class Command:
    """`rootlet ARGUMENTS` over HashLM at 20 ms a step, reading its output as it comes."""

    def __init__(self, *arguments: str, stderr: int = subprocess.PIPE) -> None:
        environment = {**os.environ, "ROOTLET_TEST_EXECUTOR": "hash_lm:20", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rootlet.cli.main", *arguments, "--ctx-len", "4096"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        self.out = b""

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves no process and no open pipe: after a failed check they would fail a neighbour's test too."""
        self.process.kill()
        self.process.communicate()

    def read_until(self, pattern: bytes) -> None:
        """Reads stdout on until it holds `pattern`."""
        assert self.process.stdout is not None
        end_s = time.monotonic() + DEADLINE_S
        while not re.search(pattern, self.out):
            assert time.monotonic() < end_s, self.out
            more = os.read(self.process.stdout.fileno(), 4096)
            assert more, (self.out, self.process.stderr.read() if self.process.stderr else b"")
            self.out += more

    def say(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def end(self) -> tuple[int, bytes]:
        """(exit code, what it wrote on stderr)"""
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err


def test_ctrl_c_ends_an_answer_but_not_the_conversation() -> None:
    with Command("chat") as chat:
        chat.read_until(rb"/reset")
        chat.say(b"hello\n")
        chat.read_until(rb"ends\n" + FOUR_SAMPLED)
        chat.process.send_signal(signal.SIGINT)
        chat.say(b"/help\n/quit\n")
        chat.read_until(rb"/reset[\s\S]*/reset forgets")
        assert chat.end() == (0, b"")


def test_ctrl_c_ends_run_with_130_and_no_traceback() -> None:
    with Command("run", "-", "hello") as run:
        run.read_until(FOUR_SAMPLED)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == (130, b"")


def test_a_batch_shows_how_far_it_is_and_says_at_ctrl_c_that_it_can_go_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {"short": {"prompt": "a", "max_tokens": 1}, "long": {"prompt": "b", "max_tokens": 4000, "ignore_eos": True}}
    source.write_text("".join(json.dumps({"custom_id": name, "url": "/v1/completions", "body": body}) + "\n" for name, body in bodies.items()))
    screen, terminal = pty.openpty()
    try:
        with Command("batch", str(source), str(target), stderr=terminal) as batch:
            shown = b""
            while b"1 of 2\r" not in shown:
                assert batch.process.poll() is None, shown
                shown += os.read(screen, 4096)
            batch.process.send_signal(signal.SIGINT)
            assert batch.end()[0] == 130
        said = os.read(screen, 4096)
    finally:
        os.close(screen)
        os.close(terminal)
    assert said.endswith(b"rootlet: stopped; the same command goes on with the lines that %s lacks\r\n" % os.fsencode(target))
    assert b"Traceback" not in said
    assert [json.loads(line)["custom_id"] for line in target.read_text().splitlines()] == ["short"]


def test_ctrl_c_ends_an_idle_server_soon_and_with_0() -> None:
    with Command("serve", "--port", "0") as serve:
        serve.read_until(rb"ready on")
        with Granted() as clock:
            serve.process.send_signal(signal.SIGINT)
            code, _ = serve.end()
            assert code == 0
            assert clock.now_s() < 2.0


def test_ctrl_c_while_the_command_line_is_imported_says_nothing_and_gives_130() -> None:
    """The signal comes from inside the import of the commands, so no timing decides."""
    blow = "import os, signal, sys; sys.modules['cyclopts'] = type('M', (), {'__getattr__': lambda *_: os.kill(os.getpid(), signal.SIGINT)})()"
    done = subprocess.run([sys.executable, "-c", f"{blow}; from rootlet.cli.main import main; main()"], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_next_to_nothing_is_imported_before_a_ctrl_c_has_its_answer() -> None:
    """Each module of these milliseconds is one whose import a Ctrl-C turns into a traceback: of the standard library only what `signal` takes
    (and `importlib.util`, which finds an editable installation)."""
    code = "import sys, os, signal, importlib.util; old = set(sys.modules); import rootlet.cli.main; print(*sorted(set(sys.modules) - old))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True, text=True, env=environment)
    assert set(done.stdout.split()) - {"__future__"} == {"rootlet", "rootlet.cli", "rootlet.cli.main"}


def test_ctrl_c_that_a_shell_ignores_for_a_background_job_stays_ignored() -> None:
    ignore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['rootlet', '--version']"
    done = subprocess.run(
        [sys.executable, "-c", f"{ignore}; from rootlet.cli.main import main; import rootlet.cli.app; os.kill(os.getpid(), signal.SIGINT); main()"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("door", ["rootlet.engine.processes", "rootlet.cli.main"])
def test_a_process_that_is_done_does_not_take_its_interpreter_down(door: str) -> None:
    code = f"import atexit; from {door} import end_process; atexit.register(print, 'late'); print('said'); end_process(3)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (3, b"said\n")
