"""The end of a Python program that used the library and closed nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.live_server import tiny_llama

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PROGRAM = """
import sys
import rootlet
engine = rootlet.Engine(sys.argv[1], max_total_tokens=512, ctx_len=256, log_level="warning")
print(len(engine.generate([5, 6, 7], {"max_tokens": 4, "temperature": 0, "ignore_eos": True}).token_ids))
"""


def test_an_engine_that_is_left_open_ends_with_the_program_and_says_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tiny_llama(tmp_path / "model"))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert [line for line in done.stderr.splitlines() if "chat_template_missing" not in line] == []  # that one is about the model
