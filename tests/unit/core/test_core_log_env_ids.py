"""Log lines are one line each whatever they hold; environment and ids are values."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootlet.core import env, log
from rootlet.core.ids import CountingIds, RandomIds


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger("rootlet")
    before = (root.handlers[:], root.level, root.propagate)
    stream = io.StringIO()
    log.configure("info", process="test", stream=stream)
    yield stream
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def test_a_line_is_event_and_fields(lines: io.StringIO) -> None:
    log.logger("x").info("finished", rid="r1", seconds=0.123456, text="a b")
    assert lines.getvalue().rstrip().endswith('I test finished rid=r1 seconds=0.1235 text="a b"')


def test_a_value_cannot_forge_a_line_or_flood_the_log(lines: io.StringIO) -> None:
    log.logger("x").warning("dropped", rid="evil\n12:00:00 E main forged", big="y" * 10_000)
    assert lines.getvalue().count("\n") == 1
    assert len(lines.getvalue()) < 1000


def test_levels_are_obeyed(lines: io.StringIO) -> None:
    log.logger("x").debug("quiet")
    assert lines.getvalue() == ""


def test_environment_is_read_as_a_value(tmp_path: Path) -> None:
    assert [env.check_enabled({"ROOTLET_CHECK": v}) for v in ("", "0", "1")] == [False, False, True]
    assert env.fake_executor({}) is None
    assert env.fake_executor({"ROOTLET_TEST_EXECUTOR": "hash_lm"}) == "hash_lm"
    assert env.runtime_dir({"ROOTLET_RUNTIME_DIR": str(tmp_path)}) == tmp_path
    assert env.runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}).is_dir()
    assert env.config_file({}) is None
    assert env.config_file({"ROOTLET_CONFIG": "/etc/rootlet.toml"}) == Path("/etc/rootlet.toml")


def test_ids_are_unique_and_seeds_fit_in_63_bits() -> None:
    ids = RandomIds()
    assert len({ids.rid() for _ in range(100)}) == 100
    assert all(0 <= ids.seed() < 2**63 for _ in range(100))
    counting = CountingIds()
    assert [counting.rid(), counting.rid(), counting.seed()] == ["r0", "r1", 1]
