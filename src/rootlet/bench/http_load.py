"""`make bench-http`: the workloads of a driver over HTTP, each against a fresh server, and beside it llama.cpp's own server on the same file.

The driver is a program of its own (`--load`): it takes --base, --model, --workload, -c, -n, --data, --label and prints one JSON line. `single` is
held against the in-process `Engine`, measured just before. Turns are interleaved (ours, rival, ours, rival); medians of rounds. Owns its servers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rootlet.bench.server_process import free_port, running_server
from rootlet.bench.workloads import Ours
from rootlet.engine.engine import Engine
from rootlet.engine.model_source import resolve_model

READY_S = 180.0
SINGLE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """One workload: its concurrency and size, and what it must reach."""

    name: str
    concurrency: int
    size: int
    target: str


LOADS = (
    Load("single", 1, 2, "decode rate >= 90 % of the in-process one"),
    Load("fewshot", 16, 32, "whole run <= 20 s"),
    Load("chat", 16, 24, ">= 150 output tok/s"),
    Load("hot", 1, 1, "second TTFT <= 80 ms and <= 3 % of the first"),
)


@dataclass(frozen=True, slots=True)
class Driver:
    """How the driver is called. `run` gives its line, and the processor seconds that the server's processes used meanwhile as "cpu_s"."""

    python: str
    program: Path
    data: Path

    def run(self, load: Load, base: str, pid: int, label: str) -> dict[str, Any]:
        """Raises `CalledProcessError` when the driver fails."""
        command = [self.python, str(self.program), "--base", base, "--workload", load.name, "--label", label, "--data", str(self.data)]
        before = _cpu_s(pid)
        done = subprocess.run([*command, "-c", str(load.concurrency), "-n", str(load.size)], check=True, stdout=subprocess.PIPE, text=True)
        return {**json.loads(done.stdout.splitlines()[-1]), "cpu_s": {name: round(s - before.get(name, 0.0), 2) for name, s in _cpu_s(pid).items()}}


def _cpu_s(pid: int) -> dict[str, float]:
    """Processor seconds so far of a process ("main") and its children ("engine", summed)."""
    main = psutil.Process(pid)
    times = main.cpu_times()
    children = [child.cpu_times() for child in main.children()]
    return {"main": times.user + times.system, "engine": sum(t.user + t.system for t in children)}


@contextlib.contextmanager
def rival_server(python: str, model: Path, *, threads: int, context: int) -> Iterator[tuple[str, int]]:
    """llama.cpp's server (the `server` extra of llama-cpp-python) in the environment of `python`; gives (base, pid)."""
    port = free_port()
    command = [python, "-m", "llama_cpp.server", "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    flags = [
        "--n_threads",
        str(threads),
        "--n_threads_batch",
        str(threads),
        "--n_ctx",
        str(context),
        "--interrupt_requests",
        "False",
        "--verbose",
        "False",
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
        try:
            base = f"http://127.0.0.1:{port}"
            _wait_for(f"{base}/v1/models", process)
            yield base, process.pid
        finally:
            process.terminate()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError), urllib.request.urlopen(url, timeout=2.0):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    raise RuntimeError(f"no answer from {url} (exit {process.poll()})")


def inprocess_rate(model: Path, threads: int) -> float:
    """Decoded tokens a second of one request in an `Engine`, no HTTP."""
    with Engine(str(model), threads=threads, log_requests=False) as engine:
        ours = Ours(engine)
        ours.decode(1, 16)
        return ours.decode(1, SINGLE_TOKENS)


def verdict(load: Load, runs: list[dict[str, Any]], inprocess: list[float]) -> tuple[bool, str]:
    """Whether the median run reached the target, and in which numbers."""
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0] if isinstance(runs[0][key], int | float)}
    match load.name:
        case "single":
            rate, alone = 1.0 / middle["tpot_p50"], statistics.median(inprocess)
            return rate >= 0.9 * alone, f"{rate:.0f} tok/s, in-process {alone:.0f} ({rate / alone:.0%})"
        case "fewshot":
            return middle["wall"] <= 20.0, f"{middle['wall']:.1f} s"
        case "chat":
            return middle["out_tok_s"] >= 150.0, f"{middle['out_tok_s']:.0f} tok/s"
        case _:
            first, second = middle["ttft_first"], middle["ttft_second"]
            return second <= 0.08 and second <= 0.03 * first, f"{1e3 * first:.0f} ms, then {1e3 * second:.1f} ms ({second / first:.1%})"


def measure(load: Load, driver: Driver, model: Path, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float]]:
    """(ours, rival's, in-process rates), a round each; every run is printed."""
    ours, theirs, alone = list[dict[str, Any]](), list[dict[str, Any]](), list[float]()
    for _ in range(options.rounds):
        if load.name == "single":
            alone.append(inprocess_rate(model, options.threads))
        with running_server(str(model), "--threads", str(options.threads), "--no-log-requests") as server:
            ours.append(driver.run(load, server.base, server.process.pid, "rootlet"))
        print(json.dumps(ours[-1]), flush=True)
        if options.rival:
            with rival_server(options.rival, model, threads=options.threads, context=options.rival_context) as (base, pid):
                theirs.append(driver.run(load, base, pid, "llama.cpp"))
            print(json.dumps(theirs[-1]), flush=True)
    return ours, theirs, alone


def main() -> None:
    """A line a run, then a table; exit 1 with --check when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True, type=Path, help="the driver program")
    parser.add_argument("--data", required=True, type=Path, help="folder with its data files")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the driver (needs aiohttp)")
    parser.add_argument("--rival", help="interpreter of an environment with llama-cpp-python[server]; without it only ours is measured")
    parser.add_argument("--rival-context", type=int, default=4096)
    parser.add_argument("--only", default="", help="workloads, by name, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    options = parser.parse_args()
    driver, model = Driver(options.python, options.load, options.data), resolve_model(options.model)
    rows, missed = [], False
    for load in LOADS:
        if options.only and load.name not in options.only.split(","):
            continue
        ours, theirs, alone = measure(load, driver, model, options)
        reached, numbers = verdict(load, ours, alone)
        rival = verdict(load, theirs, alone)[1] if theirs else "not measured"
        missed |= not reached
        rows.append(f"| {load.name} -c {load.concurrency} -n {load.size} | {numbers} | {rival} | {load.target} | {'yes' if reached else 'NO'} |")
    print("| workload | rootlet | llama.cpp's server | target | reached |\n|---|---|---|---|---|")
    print("\n".join(rows))
    raise SystemExit(1 if missed and options.check else 0)


if __name__ == "__main__":
    main()
