"""`make trace-demo`: what `rootlet trace` says of a request that waited, was computed in chunks, was retracted and finished, on a real server.

Starts `rootlet serve` with a pool for a few requests and small chunks, sends many at once, and prints the first trace that has all four. Exit code 1
when none has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

import aiohttp

from rootlet.bench.server_process import ServerProcess, running_server
from rootlet.bench.torture import request

FLAGS = (
    "--ctx-len", "2048", "--max-total-tokens", "640", "--page-size", "16", "--chunked-prefill", "64", "--max-running", "16",
    "--conservativeness", "0.1", "--no-log-requests",
)  # fmt: skip
REQUESTS = 24


async def send_all(server: ServerProcess, rng: random.Random) -> list[str]:
    """The ids of all replies. Raises aiohttp.ClientResponseError for a refused request."""
    async with aiohttp.ClientSession(server.base, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one() -> str:
            made = request(rng, rng.randrange(70, 200), rng.randrange(60, 160), stream=False)
            async with session.post("/v1/completions", json=made, raise_for_status=True) as reply:
                return str((await reply.json())["id"])

        return list(await asyncio.gather(*(one() for _ in range(REQUESTS))))


def tells_all(found: dict[str, Any]) -> bool:
    """It waited, was chunked, was retracted, and finished."""
    events = found.get("events", [])
    kinds = [event["what"] for event in events]
    waited = any(event.get("waited") for event in events)
    return waited and kinds.count("chunk") >= 2 and "retracted" in kinds and kinds[-1] == "finished"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="file, folder or Hub id; none = the default model")
    options = parser.parse_args(arguments)
    with running_server(*([options.model] if options.model else []), *FLAGS) as server:
        ids = asyncio.run(send_all(server, random.Random(0)))
        traces = {rid: json.loads(server.get(f"/debug/requests/{urllib.parse.quote(rid, safe='')}")) for rid in ids}
        told = [rid for rid, found in traces.items() if tells_all(found)]
        print(f"rootlet serve {' '.join(FLAGS)}; {REQUESTS} requests at once, {len(told)} of them waited, were chunked, were retracted and finished.")
        if not told:
            return 1
        shortest = min(told, key=lambda rid: sum(1 + len(event.get("waited", [])) for event in traces[rid]["events"]))
        print(f"\n$ rootlet trace {shortest}", flush=True)
        return subprocess.run([sys.executable, "-m", "rootlet.cli.main", "trace", shortest, "--url", server.base], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
