"""Rows LEAK of the fault table (47, 49) on real servers: bursts with clients that leave, and memory over many requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.granted import until
from fixtures.live_server import IDLE_S, Live, body, live, prompt, tiny_flags, tiny_llama

pytestmark = pytest.mark.process

slow = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("leak"))


def burst(num: int, seed: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Requests with shared prefixes, and when their client leaves: 40 % do, some in the queue, some in prefill, some while decoding.

    A sixth of all leave after an event of their stream, however quick the machine is.
    """
    rng = random.Random(seed)
    for i in range(num):
        shared = prompt(rng.choice((16, 33, 100)), rng.randrange(3))
        extra: dict[str, Any] = {"n": 2} if i % 7 == 0 else {"logprobs": 1} if i % 5 == 0 else {"stop": "e"} if i % 11 == 0 else {}
        request = body(shared + prompt(rng.randrange(1, 150), 5000 + i), rng.randrange(1, 90), stream=rng.random() < 0.6, **extra)
        leaves_s = rng.uniform(0.0, 0.6) if rng.random() < 0.4 else None
        if i % 6 == 2:
            yield {**request, "stream": True, "incremental": True}, {"leave_after_events": 1}
        else:
            yield request, {"leave_after_s": leaves_s}


async def send(server: Live, num: int, seed: int, at_once: int) -> int:
    """Runs a burst; returns how many clients left before the end."""
    gate = asyncio.Semaphore(at_once)
    left = 0
    async with server.session() as session:

        async def one(request: dict[str, Any], leave: dict[str, Any]) -> None:
            nonlocal left
            async with gate:
                reply = await server.generate(session, request, **leave)
            left += reply.left
            assert reply.left or (reply.status, reply.error) == (200, None)

        await asyncio.gather(*(one(*item) for item in burst(num, seed)))
    return left


def run_row_47(model: Path, *flags: str, page: int, num: int) -> None:
    with live(model, *tiny_flags(page=page), *flags) as server:
        assert asyncio.run(send(server, num, seed=page, at_once=32)) > num // 20
        server.assert_exact()
        server.assert_live()
        server.assert_flushes()


@pytest.mark.parametrize(("page", "mixed", "depth"), [(1, "--mixed-chunk", "2"), (16, "--no-mixed-chunk", "2"), (16, "--mixed-chunk", "1")])
def test_row_47_leaving_clients_leave_no_page(model: Path, page: int, mixed: str, depth: str) -> None:
    run_row_47(model, mixed, "--depth", depth, page=page, num=40 if page == 1 else 100)


@slow
@pytest.mark.parametrize("detokenizer", ["inline", "process"])
@pytest.mark.parametrize("depth", ["1", "2"])
@pytest.mark.parametrize("mixed", ["--mixed-chunk", "--no-mixed-chunk"])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_row_47_full(model: Path, page: int, mixed: str, depth: str, detokenizer: str) -> None:
    run_row_47(model, mixed, "--depth", depth, "--detokenizer", detokenizer, page=page, num=400)


# ---- row 49 ----------------------------------------------------------------------------------------------------------------------------------


def block(num: int, number: int) -> Iterator[tuple[dict[str, Any], float | None]]:
    """Short unique requests: stream, whole, many logprobs, stop string, leaving clients, refused ones."""
    for i in range(num):
        ids = prompt(20, 1_000_000 * number + i)
        match i % 6:
            case 0:
                yield body(ids, 8, stream=True), None
            case 1:
                yield body(ids, 8, logprobs=20), None
            case 2:
                yield body(ids, 12, stream=True, stop="x"), None
            case 3:
                yield body(ids, 60, stream=True), 0.01
            case 4:
                yield body(ids, 8, temperature=-1.0), None
            case _:
                yield body(ids, 4), None


async def send_block(server: Live, num: int, number: int) -> None:
    gate = asyncio.Semaphore(16)
    async with server.session() as session:

        async def one(request: dict[str, Any], leave_after_s: float | None) -> None:
            async with gate:
                reply = await server.generate(session, request, leave_after_s=leave_after_s)
            assert leave_after_s is not None or reply.status == (400 if request["sampling_params"]["temperature"] < 0 else 200)

        await asyncio.gather(*(one(*item) for item in block(num, number)))


def footprint(server: Live) -> dict[int, tuple[int, int, int]]:
    """Process -> (anonymous bytes with swap, open files, threads)."""
    found = {}
    for pid in [server.main_pid, *server.pids]:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        process = psutil.Process(pid)
        found[pid] = (1024 * sum(int(lines[key].split()[0]) for key in ("RssAnon", "VmSwap")), process.num_fds(), process.num_threads())
    return found


def run_row_49(model: Path, *, num: int, slack: int) -> None:
    with live(model, *tiny_flags(), "--detokenizer", "process", check=False) as server:
        seen = []
        for number in range(5):
            asyncio.run(send_block(server, num, number))
            server.assert_exact()
            seen.append(footprint(server))
        for pid, (first_bytes, first_fds, first_threads) in seen[1].items():
            last_bytes, last_fds, last_threads = seen[4][pid]
            history = [f"{each[pid][0] / MIB:.1f}" for each in seen]
            until(lambda pid=pid, most=first_fds: psutil.Process(pid).num_fds() <= most, f"files of {pid}: {last_fds}, not {first_fds}", IDLE_S)
            assert last_bytes - first_bytes < 3 * num / 1000 * MIB + slack, f"process {pid} grows: {', '.join(history)} MiB"
            assert last_threads <= first_threads, f"process {pid}: {first_threads} threads, then {last_threads}"
        server.assert_live()


def test_row_49_memory_stays_flat_over_many_requests(model: Path) -> None:
    """Scaled down: an allocator keeps a few pages more or less, hence the slack."""
    run_row_49(model, num=300, slack=2 * MIB)


@slow
def test_row_49_full(model: Path) -> None:
    run_row_49(model, num=1000, slack=0)
