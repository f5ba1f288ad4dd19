"""What a command line means, without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootlet.cli.main import app
from rootlet.cli.serve import serve


def test_run_takes_a_dash_for_the_default_model() -> None:
    _, bound, _ = app.parse_args(["run", "-", "hi", "--max-tokens", "4"], exit_on_error=False, print_error=False)
    assert bound.arguments == {"model": "-", "prompt": "hi", "max_tokens": 4}


def test_serve_reads_the_file_that_the_environment_names_unless_a_flag_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stated, given = tmp_path / "stated.toml", tmp_path / "given.toml"
    stated.write_text("[server]\nport = 4001\n")
    given.write_text("[server]\nport = 4002\n")
    monkeypatch.setenv("ROOTLET_CONFIG", str(stated))
    for config, port in ((None, "4001"), (given, "4002")):
        assert serve(config=config, print_config=True) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("server.port"))
        assert line.split() == ["server.port", port, "file", str(config or stated)]
