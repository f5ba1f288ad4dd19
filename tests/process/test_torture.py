"""`bench/torture.py` on a tiny model: row 87 over real forwards, with a detokenizer of its own; the rest of it at full size is `make torture`."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import cast

import pytest

from fixtures.granted import Granted
from fixtures.live_server import tiny_llama
from rootlet.bench import torture
from rootlet.bench.server_process import ServerProcess

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("torture"), max_position_embeddings=32_768)


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_row_87_a_killed_child_ends_every_request_within_two_seconds(model: Path, role: str) -> None:
    with Granted() as clock:
        lines = list(torture.kill(role, [str(model)], random.Random(1), num_tokens=30_000, now_s=clock.now_s))
    assert [line for line in lines if not line.good] == []


@pytest.mark.slow
def test_everything(model: Path) -> None:
    with Granted() as clock:
        lines = list(torture.run([str(model)], 0, kill_tokens=30_000, now_s=clock.now_s))
    assert [line for line in lines if not line.good] == []


@pytest.mark.parametrize(
    ("change", "exact"),
    [({}, True), ({"free": 3}, False), ({"decode requests": 1}, False), ({"open requests": 1}, False), ({"retractions": 4}, True)],
)
def test_books_are_exact_when_pages_add_up_and_nothing_is_held(change: dict[str, int], exact: bool) -> None:
    book = {"total": 8, "free": 4, "evictable": 4, "protected": 0, "private": 0, "decode requests": 0, "open requests": 0, "retractions": 0}
    assert torture.is_exact({**book, **change}) is exact


@pytest.mark.parametrize(("exact_at", "looks"), [(1, 1), (40, 40), (10_000, torture.NUM_LOOKS)])
def test_the_books_get_looks_not_seconds(monkeypatch: pytest.MonkeyPatch, exact_at: int, looks: int) -> None:
    """So that a machine that stands still, however long, takes one of them."""
    seen = [{"total": 8, "free": 8 if look == exact_at else 3, "evictable": 0} for look in range(1, torture.NUM_LOOKS + 2)]
    left = iter(seen)
    monkeypatch.setattr(torture, "books", lambda _: next(left))
    monkeypatch.setattr(torture, "LOOK_S", 0.0)
    assert torture.idle_books(ServerProcess("", cast("subprocess.Popen[bytes]", None), Path())) == seen[looks - 1]
    assert len(list(left)) == len(seen) - looks
