"""Rootlet under stress, on a real server with a KV pool of 512 tokens: `make torture`, or `python -m rootlet.bench.torture [--model M]`.

64 requests at once in a pool that holds four; a prompt larger than the pool; 200 clients that leave at random moments; SIGKILL of the scheduler,
then of the detokenizer, under traffic. Prints what was measured and a verdict a line; exit code 1 when a verdict is bad. Does no benchmark:
times are limits, not speeds. Only the two kills are held to seconds; the rest is arranged so that it comes out alike on a slow machine, a quick one,
and one that stands still for a while.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from rootlet.bench.server_process import ServerProcess, running_server
from rootlet.core import env

POOL = 512
NUM_STORM, NUM_LEAVERS = 64, 200
NUM_WAITING, NUM_READING = 50, 50  # of the leavers: gone before anything is launched; gone with the first event of their stream
NUM_LOOKS, LOOK_S = 100, 0.05
DEATH_S = 2.0
KILL_TOKENS = 450
SILENT_S = 600.0  # so that nothing hangs; no promise
CTX_LEN = 2048


def _flags(ctx_len: int, pool: int) -> tuple[str, ...]:
    sizes = ("--ctx-len", str(ctx_len), "--max-total-tokens", str(pool), "--page-size", "16", "--chunked-prefill", "64", "--max-running", "16")
    return (*sizes, "--detokenizer", "process")


FLAGS = _flags(CTX_LEN, POOL)
_STARTED = re.compile(r"started role=(\w+) pid=(\d+)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    check: str
    result: str
    good: bool


@dataclass(slots=True)
class Ending:
    """How a request ended for its client: `end_s` is a moment of the clock that was given; `error` the error object or the broken connection."""

    status: int = 0
    num_tokens: int = 0
    finish: str = ""
    error: str = ""
    end_s: float = 0.0


def request(rng: random.Random, prompt_len: int, max_tokens: int, *, stream: bool = True) -> dict[str, Any]:
    return {
        "prompt": [rng.randrange(20, 250) for _ in range(prompt_len)],  # any vocabulary has these
        "max_tokens": max_tokens,
        "temperature": rng.choice((0.0, 1.0)),
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }


async def complete(
    session: aiohttp.ClientSession,
    body: dict[str, Any],
    leave_after_s: float | None = None,
    *,
    leave_at_first: bool = False,
    now_s: Callable[[], float] = time.monotonic,
) -> Ending:
    """One completion to its end, or until its client leaves: after so many seconds, or with the first event of its stream."""
    ending = Ending()
    try:
        async with asyncio.timeout(leave_after_s), session.post("/v1/completions", json=body) as reply:
            ending.status = reply.status
            if body["stream"] and reply.status == 200:
                async for raw in reply.content:
                    _take_event(ending, raw.decode().strip())
                    if leave_at_first:
                        ending.finish = "left"
                        break
            else:
                _take(ending, await reply.json())
    except TimeoutError:
        ending.finish = "left"
    except aiohttp.ClientError as error:
        ending.error = repr(error)
    ending.end_s = now_s()
    return ending


def _take_event(ending: Ending, line: str) -> None:
    data = line.removeprefix("data: ")
    if data not in (line, "[DONE]"):
        _take(ending, json.loads(data))


def _take(ending: Ending, item: dict[str, Any]) -> None:
    if "error" in item:
        ending.error = str(item["error"]["code"]) + ": " + str(item["error"]["message"])
    for choice in item.get("choices", ()):
        ending.finish = choice["finish_reason"] or ending.finish
    usage = item.get("usage")
    if usage:
        ending.num_tokens = usage["completion_tokens"]


def _session(server: ServerProcess) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(server.base, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENT_S))


@contextlib.asynccontextmanager
async def _held(session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Nothing is launched in the block: who asks meanwhile waits inside."""
    async with session.post("/pause_generation", json={"mode": "in_place"}) as reply:
        reply.raise_for_status()
    try:
        yield
    finally:
        async with session.post("/continue_generation") as reply:
            reply.raise_for_status()


async def _inside(server: ServerProcess, count: int) -> None:
    """Waits until so many requests are open."""
    while int(str((await asyncio.to_thread(server.state))["num_open_requests"])) < count:
        await asyncio.sleep(0.01)


async def _one(server: ServerProcess, body: dict[str, Any]) -> Ending:
    async with _session(server) as session:
        return await complete(session, body)


async def _together(server: ServerProcess, bodies: Sequence[dict[str, Any]]) -> list[Ending]:
    """None is begun before all are inside: they compete for the pool however slowly they arrive."""
    async with _session(server) as session:
        async with _held(session):
            tasks = [asyncio.ensure_future(complete(session, body)) for body in bodies]
            await _inside(server, len(tasks))
        return list(await asyncio.gather(*tasks))


# ---- accounting ------------------------------------------------------------------------------------------------------------------------------


def books(server: ServerProcess) -> dict[str, int]:
    """Pages by owner, and everything that must be 0 when idle."""
    state = json.loads(server.get("/debug/state"))
    queued = {f"{phase} requests": len(reqs) for phase, reqs in state["queues"].items()}
    return {
        **state["ledger"],
        **queued,
        "open requests": int(str(server.state()["num_open_requests"])),
        "retractions": state["counters"]["retractions"],
    }


def is_exact(book: dict[str, int]) -> bool:
    pages = book["free"] + book["evictable"] == book["total"]
    return pages and not any(value for name, value in book.items() if name.endswith("requests"))


def idle_books(server: ServerProcess) -> dict[str, int]:
    """The books once they are exact, or as they stand after `NUM_LOOKS` looks: 5 s on a quick machine. The server answers each of them, so a slow
    one gets longer, and a machine that stands still loses one look."""
    book = books(server)
    for _ in range(NUM_LOOKS - 1):
        if is_exact(book):
            break
        time.sleep(LOOK_S)
        book = books(server)
    return book


def show(book: dict[str, int]) -> str:
    held = ", ".join(f"{name} {value}" for name, value in book.items() if name.endswith("requests") and value) or "nothing held"
    return f"free {book['free']} + cached {book['evictable']} = {book['free'] + book['evictable']} of {book['total']} pages, {held}"


# ---- the checks ------------------------------------------------------------------------------------------------------------------------------


def storm(server: ServerProcess, rng: random.Random) -> Iterator[Line]:
    """64 at once, each with its 120 tokens."""
    bodies = [request(rng, rng.randrange(40, 90), 120) for _ in range(NUM_STORM)]
    begun_s = time.monotonic()
    endings = asyncio.run(_together(server, bodies))
    took_s = time.monotonic() - begun_s
    good = sum(e.status == 200 and not e.error and e.finish == "length" and e.num_tokens == 120 for e in endings)
    book = idle_books(server)
    yield Line(f"{NUM_STORM} concurrent requests", f"{good} complete with exactly 120 tokens, in {took_s:.1f} s", good == NUM_STORM)
    yield Line("  retractions", str(book["retractions"]), book["retractions"] > 0)
    yield Line("  idle accounting", show(book), is_exact(book))


def too_large(server: ServerProcess, rng: random.Random) -> Iterator[Line]:
    ending = asyncio.run(_one(server, request(rng, 600, 1, stream=False)))
    yield Line("a prompt of 600 tokens", f"{ending.status} {ending.error}", ending.status == 400 and str(POOL) in ending.error)


async def _leave(server: ServerProcess, rng: random.Random) -> list[Ending]:
    """All come while nothing is launched. The first of them are gone before anything is, the next go with their first event, and the others at a
    random moment of five seconds, wherever they stand."""

    def body(stream: bool) -> dict[str, Any]:
        return request(rng, rng.randrange(1, 300), rng.randrange(1, 200), stream=stream)

    async with _session(server) as session:
        async with _held(session):
            waiting = [asyncio.ensure_future(complete(session, body(rng.random() < 0.7), rng.uniform(0.0, 1.0))) for _ in range(NUM_WAITING)]
            reading = [asyncio.ensure_future(complete(session, body(True), leave_at_first=True)) for _ in range(NUM_READING)]
            others = [
                asyncio.ensure_future(complete(session, body(rng.random() < 0.7), rng.uniform(0.0, 5.0)))
                for _ in range(NUM_LEAVERS - NUM_WAITING - NUM_READING)
            ]
            await asyncio.gather(*waiting)
        return list(await asyncio.gather(*waiting, *reading, *others))


def leavers(server: ServerProcess, rng: random.Random) -> Iterator[Line]:
    """200 clients that leave: queued, with the first token, or at a random moment, in prefill, while decoding or after the end."""
    before = idle_books(server)
    endings = asyncio.run(_leave(server, rng))
    after = idle_books(server)
    left = sum(e.finish == "left" and not e.error for e in endings)
    answered = sum(e.finish == "length" and e.status == 200 and not e.error for e in endings)
    bound_to = endings[: NUM_WAITING + NUM_READING]
    good = all(e.finish == "left" for e in bound_to) and left + answered == NUM_LEAVERS
    yield Line(f"{NUM_LEAVERS} clients that may leave", f"{left} left early, {answered} had their answer", good)
    yield Line("  accounting before", show(before), is_exact(before))
    yield Line("  accounting after", show(after), is_exact(after))
    server.get("/flush_cache?timeout=60")
    flushed = books(server)
    yield Line("  after a flush", show(flushed), flushed["free"] == flushed["total"])
    traces = server.log.read_text(errors="replace").count("Traceback")
    yield Line("  the server", f"health {_health(server)}, {traces} tracebacks in the log", traces == 0 and _health(server) == 200)


def _health(server: ServerProcess) -> int:
    server.get("/health")  # raises unless 200
    return 200


async def _until_killed(
    server: ServerProcess, pid: int, rng: random.Random, num_tokens: int, now_s: Callable[[], float]
) -> tuple[float, list[Ending]]:
    """Open requests, one of them unstreamed; the kill when the first has its text. Returns the moment of the kill and how all ended."""
    async with _session(server) as session:
        bodies = [request(rng, 20, num_tokens, stream=i > 0) for i in range(8)]
        async with _held(session):
            tasks = [asyncio.ensure_future(complete(session, body, now_s=now_s)) for body in bodies]
            await _inside(server, len(tasks))
        async with session.post("/v1/completions", json=request(rng, 20, num_tokens)) as witness:
            await witness.content.readline()
            killed_s = now_s()
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(aiohttp.ClientError):
                await witness.read()
        return killed_s, list(await asyncio.gather(*tasks))


def kill(
    role: str, model: Sequence[str], rng: random.Random, *, num_tokens: int = KILL_TOKENS, now_s: Callable[[], float] = time.monotonic
) -> Iterator[Line]:
    """SIGKILL one child of a server under load: every open request is told, the server ends with code 1 and leaves nothing behind.

    `num_tokens` of each request: so many that none is over before the kill; the pool holds all of them, or the witness of the kill would wait for
    the others to end. The limits hold in seconds of `now_s`.
    """
    flags = _flags(max(CTX_LEN, num_tokens + 100), 10 * (num_tokens + 100))
    with tempfile.TemporaryDirectory(prefix="rootlet-torture-") as folder, running_server(*model, *flags, env=_environment(folder)) as server:
        pids = {name: int(pid) for name, pid in _STARTED.findall(server.log.read_text())}
        killed_s, endings = asyncio.run(_until_killed(server, pids[role], rng, num_tokens, now_s))
        code = server.process.wait(timeout=120.0)
        exit_s = now_s() - killed_s
        slowest_s = max(e.end_s for e in endings) - killed_s
        told = sum(bool(e.error) for e in endings)
        codes = ", ".join(sorted({e.error.partition(":")[0] for e in endings if e.error}))
        alive = [name for name, pid in pids.items() if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        good = told == len(endings) and slowest_s < DEATH_S
        yield Line(f"SIGKILL of the {role}", f"{told} of {len(endings)} open requests got an error ({codes}), the last after {slowest_s:.2f} s", good)
        traces = server.log.read_text(errors="replace").count("Traceback")
        files = len(os.listdir(folder))
        ended = f"exit code {code} after {exit_s:.2f} s; {len(alive)} processes and {files} files left, {traces} tracebacks"
        yield Line("  the server", ended, code == 1 and not alive and not files and traces == 0)


def _environment(runtime_dir: str) -> dict[str, str]:
    return {**env.environment(), "ROOTLET_RUNTIME_DIR": runtime_dir}


def run(model: Sequence[str], seed: int, *, kill_tokens: int = KILL_TOKENS, now_s: Callable[[], float] = time.monotonic) -> Iterator[Line]:
    """All of it; `kill_tokens` and `now_s` are for the two kills."""
    rng = random.Random(seed)
    with running_server(*model, *FLAGS) as server:
        yield from storm(server, rng)
        yield from too_large(server, rng)
        yield from leavers(server, rng)
        code = server.stop()
        yield Line("  SIGTERM", f"exit code {code}", code == 0)
    for role in ("scheduler", "detokenizer"):
        yield from kill(role, model, rng, num_tokens=kill_tokens, now_s=now_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="file, folder or Hub id; none = the default model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"KV pool of {POOL} tokens; rootlet serve {' '.join(FLAGS)}", flush=True)
    failed = 0
    for line in run([options.model] if options.model else [], options.seed):
        failed += not line.good
        print(f"{'ok  ' if line.good else 'FAIL'}  {line.check:28} {line.result}", flush=True)
    print(f"{failed} failed" if failed else "all as promised")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
