"""What an earlier run of `rootlet batch` left decides what is asked again, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rootlet.cli.batch import answered, batch, num_failed, read_lines
from rootlet.core.errors import InvalidValue


def _reply(name: str, status: int) -> str:
    return json.dumps({"id": "x", "custom_id": name, "response": {"status_code": status, "body": {}}, "error": None}) + "\n"


def test_failures_that_may_pass_are_asked_again_others_stay(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(_reply("good", 200) + _reply("bad", 400) + _reply("busy", 429) + _reply("dead", 503) + '{"custom_id": "cut')
    assert num_failed_of(target) == 3
    assert answered(target) == {"good", "bad"}
    assert target.read_text() == _reply("good", 200) + _reply("bad", 400)
    assert num_failed(target) == 1


def num_failed_of(target: Path) -> int:
    whole = target.with_name("whole.jsonl")
    whole.write_text("".join(line for line in target.read_text().splitlines(keepends=True) if line.endswith("\n")))
    return num_failed(whole)


def test_a_failure_that_stands_keeps_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"custom_id": name, "url": "/v1/completions", "body": {}}) + "\n" for name in ("a", "b")))
    target.write_text(_reply("a", 200) + _reply("b", 400))
    assert batch(source, target) == 1  # nothing to do, so no engine
    assert "1 answered, 1 failed" in capsys.readouterr().err
    target.write_text(_reply("a", 200) + _reply("b", 200))
    assert batch(source, target) == 0


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("my notes\n")
    with pytest.raises(InvalidValue, match=r"notes\.txt:1 is not a line of a batch's output"):
        answered(target)
    assert target.read_text() == "my notes\n"


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"custom_id": "a\u2028b", "url": "/v1/completions", "body": {}}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [line["custom_id"] for line in read_lines(source)] == ["a\u2028b"]
