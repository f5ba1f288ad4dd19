"""What a command line means, without running it."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rootlet.cli.app import app
from rootlet.cli.local_engine import terminal_sampling
from rootlet.cli.panel import StartupPanel
from rootlet.cli.run import check_arguments
from rootlet.cli.serve import serve
from rootlet.core.errors import InvalidValue
from rootlet.engine.launch_events import LaunchEvent
from rootlet.engine.model_source import DEFAULT_MODEL


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


def test_options_may_stand_before_the_dash() -> None:
    _, bound, _ = app.parse_args(["run", "--max-tokens", "5", "-", "hi"], exit_on_error=False, print_error=False)
    assert bound.arguments == {"model": "-", "prompt": "hi", "max_tokens": 5}


def test_a_lone_question_is_told_where_it_belongs() -> None:
    with pytest.raises(InvalidValue, match=r"rootlet run - 'why is it dark\?'"):
        check_arguments("why is it dark?", None)
    for model, prompt in ((None, None), ("-", None), ("org/name", None), (str(Path(__file__)), None), ("what ever", "hi")):
        check_arguments(model, prompt)


@pytest.mark.parametrize("command", ["run", "chat", "batch"])
def test_commands_without_a_server_do_not_know_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    app([command, "--help"], result_action="return_value")
    shown = capsys.readouterr().out
    assert "--max-running" in shown
    assert "--log-level" in shown
    assert not [flag for flag in ("--port", "--host", "--drain-timeout", "--keep-alive", "--detokenizer") if flag in shown]


def test_print_config_names_the_default_model_and_why_a_value_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(print_config=True) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert f"default model, {DEFAULT_MODEL.file_name}" in lines["model.model"]
    assert "cpu" in lines["compute.device"]
    assert "auto:" in lines["scheduler.depth"]


def test_a_panel_gives_the_cursor_back_when_it_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    with StartupPanel(key=None, host="127.0.0.1") as panel:
        panel.on_event(LaunchEvent("listening", url="http://x"))  # and never "ready" or "stopped"
    out = capsys.readouterr().out
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize("key", [None, "SECRET"])
def test_the_line_to_paste_sends_a_key_where_one_is_asked_for(key: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with StartupPanel(key=key, host="127.0.0.1") as panel:
        panel.on_event(LaunchEvent("listening", url="http://x"))
        panel.on_event(LaunchEvent("ready"))
    out = capsys.readouterr().out
    command = shlex.split(out[out.index("  curl ") : out.index("  from openai")].replace("\\\n", " "))
    assert command[:2] == ["curl", "http://x/v1/chat/completions"]
    assert command.count("-H") == (1 if key is None else 2)
    assert ("Authorization: Bearer YOUR_KEY" in command) == (key is not None)
    assert "SECRET" not in out


@pytest.mark.parametrize(("mode", "recommended", "stated", "wanted"), [
    ("model", {}, {"seed": 1}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}),
    ("model", {}, {"temperature": 1.0}, {"temperature": 1.0}),
    ("model", {"temperature": 0.6}, {"seed": 1}, {"seed": 1}),
    ("openai", {}, {"seed": 1}, {"seed": 1}),
])  # fmt: skip
def test_a_terminal_samples_calmly_unless_somebody_says_how(
    mode: str, recommended: dict[str, Any], stated: dict[str, Any], wanted: dict[str, Any]
) -> None:
    config = SimpleNamespace(server=SimpleNamespace(sampling_defaults=mode))
    engine: Any = SimpleNamespace(config=config, manager=SimpleNamespace(sampling_defaults=recommended))
    assert terminal_sampling(engine, stated) == wanted
