"""`rootlet trace` over a real server: who waited, was prefilled in chunks, was retracted and finished has every tick of its life explained."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys

import pytest

from fixtures.live_server import Live, body, held, prompt
from rootlet.bench.server_process import running_server

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

FLAGS = ("--max-total-tokens", "2048", "--max-running", "1", "--chunked-prefill", "64", "--log-level", "warning")
FAKE = {"ROOTLET_TEST_EXECUTOR": "hash_lm:5", "ROOTLET_TEST_RETRACT": "25", "ROOTLET_CHECK": "1"}


def ids(length: int, seed: int) -> list[int]:
    return [4 + i % 50 for i in prompt(length, seed)]


async def two_in_a_row(live: Live) -> None:
    """The second waits behind the first for the only row; both are inside before anything is launched."""
    async with live.session() as session:
        with held(live.server) as inside:
            asked = []
            for number, item in enumerate(({**body(ids(30, 1), 60), "rid": "first"}, {**body(ids(150, 2), 40), "rid": "second"}), 1):
                asked.append(asyncio.create_task(live.generate(session, item)))
                await asyncio.to_thread(inside, number)
        await asyncio.gather(*asked)


def trace(url: str, rid: str) -> str:
    command = [sys.executable, "-m", "rootlet.cli.main", "trace", rid, "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_life_with_every_turn_is_told_in_words() -> None:
    with running_server(*FLAGS, env={**os.environ, **FAKE}) as server:
        live = Live(server)
        asyncio.run(two_in_a_row(live))
        told = trace(server.base, "second")
        print(told)
        live.assert_exact()
    lines = [line.strip() for line in told.splitlines()]
    assert lines[0] == "second: done; prompt 150 tokens, at most 40 new, priority 0"
    story = [re.sub(r"^[\d.]+ +", "", re.sub(r"^[\d.]+ +(?=\d+ )", "", line)) for line in lines[2:]]
    assert story[0] == "queued"
    waits = [line for line in story if line.startswith("waited")]
    assert "rows: needs 1, has 0; --max-running is 1" in waits[1]
    assert "paused: nothing is launched until the server is told to continue" in waits[0]
    assert all("rows: needs 1, has 0; --max-running is 1" in line or "decode steps" in line for line in waits[1:])
    chunks = [line for line in story if line.startswith("chunk")]
    assert [re.sub(r", in step \d+", "", line) for line in chunks[:3]] == [
        "chunk 1: tokens 0..63 of 150",
        "chunk 2: tokens 64..127 of 150",
        "chunk 3: tokens 128..149 of 150",
    ]
    assert any(re.fullmatch(r"retracted: gave its KV back with \d+ tokens drawn, waits again \(forced, by a test\)", line) for line in story)
    assert story[-1] == "finished: length after 40 tokens"
    assert_every_tick_is_explained(told)


def assert_every_tick_is_explained(told: str) -> None:
    """Between being queued and being admitted there is no tick without a reason."""
    queued = None
    explained: set[int] = set()
    for line in told.splitlines()[2:]:
        waited = re.search(r"(\d+)(?:\.\.(\d+))?  waited", line)
        event = re.search(r" (\d+)  (queued|retracted|admitted)", line)
        if waited:
            first, last = int(waited[1]), int(waited[2] or waited[1])
            explained |= set(range(first, last + 1))
        elif event and event[2] in ("queued", "retracted"):
            queued = int(event[1])
        elif event and queued is not None:
            missing = set(range(queued + 1, int(event[1]))) - explained
            assert not missing, f"ticks {sorted(missing)} before the admission in tick {event[1]} have no reason:\n{told}"
