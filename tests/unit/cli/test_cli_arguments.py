"""What a command line means, without running it."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from rootlet.cli.app import app
from rootlet.cli.flags import check_temperature
from rootlet.cli.local_engine import terminal_sampling
from rootlet.cli.panel import StartupPanel
from rootlet.cli.run import check_arguments
from rootlet.cli.serve import serve
from rootlet.core.errors import InvalidValue
from rootlet.engine.launch_events import LaunchEvent, print_event
from rootlet.engine.model_source import DEFAULT_MODEL
from rootlet.ipc.messages import LoadProgress


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


def loading(phase: str, done: float, elapsed_s: float) -> LaunchEvent:
    return LaunchEvent("progress", progress=LoadProgress(phase, done, "a.weight", elapsed_s))


@pytest.mark.parametrize("end", ["ready", "failed", None])
def test_progress_on_a_terminal_is_one_line_that_log_lines_fall_over(
    end: Literal["ready", "failed"] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    with StartupPanel(key=None, host="127.0.0.1") as panel:
        panel.on_event(LaunchEvent("listening", url="http://x"))
        capsys.readouterr()
        for event in (loading("open", 0.0, 0.0), loading("weights", 0.5, 0.2), loading("weights", 0.6, 0.25), loading("weights", 1.0, 0.4)):
            panel.on_event(event)
        drawn = capsys.readouterr().out
        if end is not None:
            panel.on_event(LaunchEvent(end, message="why"))
    after = "".join(capsys.readouterr())
    shown = ["\x1b[K  0 %  open  a.weight  0.0 s\r", "\x1b[K 50 %  weights  a.weight  0.2 s\r", "\x1b[K100 %  weights  a.weight  0.4 s\r"]
    assert drawn == "".join(shown)  # 0.25 s is too soon after 0.2 s; the cursor is left at the beginning and never hidden
    assert after.startswith("\x1b[K")
    assert after.count("\x1b") == 1
    assert ("curl" in after, "rootlet: why" in after) == (end == "ready", end == "failed")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with StartupPanel(key=None, host="127.0.0.1") as panel:
        panel.on_event(LaunchEvent("listening", url="http://x"))
        panel.on_event(loading("weights", 0.5, 0.2))
        panel.on_event(loading("weights", 1.0, 0.4))
        panel.on_event(LaunchEvent("ready", url="http://x", served_names=("m",)))
    assert capsys.readouterr().out.splitlines()[:3] == [
        "rootlet: listening on http://x (model is loading)",
        "rootlet: weights done (0.4 s)",
        "rootlet: ready on http://x as m",
    ]


class Writes(io.StringIO):
    """A stream without a buffer, as PYTHONUNBUFFERED makes them: each write is one of the system's."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        if text:
            self.writes.append(text)
        return len(text)


def test_a_plain_line_is_one_write_so_that_no_other_process_writes_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = Writes(), Writes()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    events = [
        LaunchEvent("listening", url="u"),
        loading("graph", 0.0, 0.0),
        loading("graph", 1.0, 0.1),
        LaunchEvent("stopped"),
        LaunchEvent("failed", message="m"),
    ]
    for event in events:
        print_event(event)
    assert out.writes == ["rootlet: listening on u (model is loading)\n", "rootlet: graph done (0.1 s)\n", "rootlet: stopped\n"]
    assert err.writes == ["rootlet: m\n"]


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize("value", ["2.01", "-0.1", "nan", "inf"])
def test_a_temperature_of_noise_is_refused_before_anything_is_loaded(command: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootlet.cli.local_engine.open_engine", lambda *_: pytest.fail("loaded"))
    function, bound, _ = app.parse_args([command, "--temperature", value], exit_on_error=False, print_error=False)
    with pytest.raises(InvalidValue, match=r"--temperature must be in \[0, 2\], got "):
        function(*bound.args, **bound.kwargs)


def test_the_ends_of_the_temperature_are_taken() -> None:
    for value in (None, 0.0, 2.0):
        check_temperature(value)


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
