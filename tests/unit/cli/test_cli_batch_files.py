"""`rootlet batch` on files that are no batch files: each is refused with its place, before a model is loaded and without a change to the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rootlet.cli.batch import batch, check_target, read_lines
from rootlet.core.errors import InvalidValue


def line(body: str = "{}", name: str = '"a"') -> bytes:
    return f'{{"custom_id": {name}, "url": "/v1/completions", "body": {body}}}'.encode()


@pytest.mark.parametrize("bad", [
    b"\xff\xfe", line('{"prompt": "\xff"}').replace("\xff".encode(), b"\xff"), line("[" * 100_000 + "]" * 100_000), b"[" * 100_000,
    line('{"temperature": NaN}'), line('{"temperature": 1e999}'), line('{"seed": 1' + "0" * 400 + "}"), line('{"prompt": "a", "prompt": "b"}'),
    line('{"prompt": "\\ud83d"}'), line(name='"\\ud800"'), b"5", b"[]", b"null", line("[]"), line("null"), line(name="5"), line()[:-1],
])  # fmt: skip
def test_a_line_that_no_server_would_take_is_named_and_nothing_is_answered(bad: bytes, tmp_path: Path) -> None:
    """What a lenient parser lets through (NaN, the second of two keys, half a surrogate pair) would be asked as something else."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line(name='"first"') + b"\r\n\n" + bad + b"\n")
    for _ in range(2):
        with pytest.raises(InvalidValue, match=r"in\.jsonl:3") as found:
            batch(source, target)
        assert len(found.value.message) < 1000
    assert not target.exists()


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + line() + b"\r\n" + line(name='"b"'))
    assert [found["custom_id"] for found in read_lines(source)] == ["a", "b"]


def test_a_target_without_an_end_is_no_target(tmp_path: Path) -> None:
    """Reading what an earlier run left in /dev/full took all memory, and renaming the new file over /dev/null would take that away."""
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    source.write_bytes(line())
    os.mkfifo(pipe)
    for target in (pipe, tmp_path):
        with pytest.raises(InvalidValue, match="is no file"):
            batch(source, target)
    with pytest.raises(InvalidValue, match=r"cannot write .*No such file"):
        batch(source, tmp_path / "none" / "out.jsonl")


def test_a_target_of_somebody_else_keeps_its_bytes(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line())
    reply = json.dumps({"custom_id": "a", "response": {"status_code": 200}}).encode() + b"\n"
    for theirs in (b"\xff\xfe\n", reply + b"\xff\n", b"[" * 100_000 + b"\n"):
        target.write_bytes(theirs)
        check_target(target)
        with pytest.raises(InvalidValue, match="is not a line of a batch's output"):
            batch(source, target)
        assert target.read_bytes() == theirs
