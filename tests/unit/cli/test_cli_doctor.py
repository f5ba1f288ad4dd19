"""`rootlet doctor`: what stands in the way and what is only worth a note; nothing is recommended that is not there."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
from pathlib import Path

import pytest

from rootlet.cli import doctor as subject
from rootlet.cli.doctor import Finding, doctor, examine


def told(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, str], str]:
    """(the line of each finding, the last line)."""
    *lines, _, last = capsys.readouterr().out.splitlines()
    return {line[5:20].strip(): line for line in lines}, last


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which all is well, whatever this one is doing."""
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(subject, "_native", lambda: Finding("native kernels", "ok", "built"))
    monkeypatch.setenv("ROOTLET_CACHE", str(tmp_path / "empty"))


@pytest.mark.usefixtures("quiet")
def test_a_busy_machine_is_a_note_and_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(port=0) == 0
    assert told(capsys)[0]["load"].startswith("ok ")
    monkeypatch.setattr("psutil.getloadavg", lambda: (4096.0, 0.0, 0.0))
    assert doctor(port=0) == 0
    lines, last = told(capsys)
    assert lines["load"].startswith("note load")
    assert "4096.0 running" in lines["load"]
    assert last.endswith("serve --port 0")
    assert doctor(port=0, as_json=True) == 0
    load = next(entry for entry in json.loads(capsys.readouterr().out) if entry["what"] == "load")
    assert (load["ok"], load["level"]) == (True, "note")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["no such model.gguf", "./missing/model.gguf", "~/nothing/here.gguf", ""])
def test_a_model_that_is_not_there_is_not_recommended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor(name, port=0) == 1
    lines, last = told(capsys)
    assert lines["model"].startswith("LOOK")
    assert "rootlet serve" not in last
    assert not name or name not in last


@pytest.mark.usefixtures("quiet")
def test_a_hub_name_is_no_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("org/some-model", port=0) == 0
    lines, last = told(capsys)
    assert "Hub" in lines["model"]
    assert last.endswith("serve org/some-model --port 0")


@pytest.mark.usefixtures("quiet")
def test_a_port_in_use_is_not_recommended_and_one_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert doctor(port=port) == 1
        lines, last = told(capsys)
    assert f"127.0.0.1:{port} cannot be used" in lines["port"]
    assert last.endswith("serve --port 0")
    for impossible in (70_000, -1):
        assert doctor(port=impossible) == 1
        assert f"no port {impossible}" in told(capsys)[0]["port"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("on_path", [True, False])
def test_the_command_to_paste_is_one_that_this_machine_has(
    on_path: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Path(subject.sys.executable).parent
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin" if on_path else "/usr/bin:/bin")
    doctor(port=0)
    command = shlex.split(told(capsys)[1])[0]
    assert shutil.which(command) is not None
    assert Path(str(shutil.which(command))).parent == here


@pytest.mark.parametrize("has_compiler", [True, False])
def test_the_cure_for_missing_kernels_names_a_make_target_only_where_there_is_one(
    has_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "find_spec", lambda _name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if has_compiler or name == "make" else None)
    source = tmp_path / "a source"
    monkeypatch.setattr(subject, "SOURCE", source)
    monkeypatch.setattr("sys.prefix", str(source / ".venv"))
    finding = next(f for f in examine(None, 0) if f.what == "native kernels")
    assert finding.level == "LOOK"
    assert "make" not in finding.text
    source.mkdir()
    (source / "Makefile").touch()
    text = next(f for f in examine(None, 0) if f.what == "native kernels").text
    assert (f"make -C '{source}' build" in text) == has_compiler
    assert ("compiler" in text) == (not has_compiler)


def test_the_source_tree_is_where_its_makefile_is() -> None:
    assert (subject.SOURCE / "Makefile").is_file()
    assert "build:" in (subject.SOURCE / "Makefile").read_text()
