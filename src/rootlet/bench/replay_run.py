"""`make bench-replay`: a minute of load on a real server that records, then `rootlet replay` of the record, which must find no differing plan.

The load is what makes schedulers disagree with themselves: a pool for four requests and many more at once (retractions), chunks, shared beginnings,
clients that leave, parallel samples, sampled and greedy rows. Exit code 1 when a plan differs, or when the load was too tame to prove anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rootlet.bench.server_process import ServerProcess, running_server
from rootlet.bench.torture import Ending, complete, request

FLAGS = (
    "--ctx-len", "2048", "--max-total-tokens", "640", "--page-size", "16", "--chunked-prefill", "64", "--max-running", "16", "--no-log-requests",
)  # fmt: skip
CLIENTS = 32
FAMILIES = 4


def body(rng: random.Random) -> dict[str, Any]:
    """One of four beginnings, or none, and a tail of its own."""
    made = request(rng, rng.randrange(1, 200), rng.randrange(1, 160), stream=rng.random() < 0.7)
    family = rng.randrange(FAMILIES + 1)
    if family < FAMILIES:
        made["prompt"] = [20 + (family * 31 + 7 * i) % 200 for i in range(96)] + made["prompt"]
    if rng.random() < 0.1:
        made["n"] = 2
    return made


async def keep_busy(server: ServerProcess, seconds: float, rng: random.Random) -> list[Ending]:
    """`CLIENTS` clients, each with one request after the other until the time is over; every fifth leaves early."""
    until_s, endings = time.monotonic() + seconds, list[Ending]()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(server.base, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def client() -> None:
            while time.monotonic() < until_s:
                leave_after_s = rng.uniform(0.0, 3.0) if rng.random() < 0.2 else None
                endings.append(await complete(session, body(rng), leave_after_s))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return endings


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="file, folder or Hub id; none = the default model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model = [options.model] if options.model else []
    with tempfile.TemporaryDirectory(prefix="rootlet-record-") as folder:
        record = Path(folder) / "record.jsonl"
        with running_server(*model, *FLAGS, "--record", str(record)) as server:
            print(f"rootlet serve {' '.join(FLAGS)} --record FILE, {CLIENTS} clients for {options.seconds:g} s", flush=True)
            endings = asyncio.run(keep_busy(server, options.seconds, random.Random(options.seed)))
            counters = json.loads(server.get("/debug/state"))["counters"]
            code = server.stop()
        left, failed = sum(e.finish == "left" for e in endings), sum(bool(e.error) for e in endings)
        print(f"{len(endings)} requests, {left} left early, {failed} with an error; {counters['retractions']} retractions; exit code {code}")
        print(f"the record has {record.stat().st_size / 2**20:.1f} MiB; rootlet replay FILE says:", flush=True)
        begin_s = time.monotonic()
        verdict = subprocess.run([sys.executable, "-m", "rootlet.cli.main", "replay", str(record)], check=False).returncode
        print(f"in {time.monotonic() - begin_s:.1f} s")
    tame = not counters["retractions"] or not left
    return 1 if verdict or code or failed or tame else 0


if __name__ == "__main__":
    sys.exit(main())
