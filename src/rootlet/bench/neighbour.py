"""`make bench-neighbour`: what a busy process on one core costs a decode, and what an idle server costs its machine.

Turns are interleaved (alone, beside the neighbour, alone, ...). The neighbour is a process that does nothing but count, at the server's priority,
held to the first core where the system can do that. A team that spun on it would lose far more than its share; one that sleeps too early loses too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from rootlet.bench.server_process import running_server
from rootlet.bench.step import StepBench
from rootlet.engine.model_source import resolve_model

BUSY = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(sys.argv[1])})
print("busy", flush=True)
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000):
        pass
"""
IDLE_S = 10.0
MAX_IDLE = 0.01


@contextlib.contextmanager
def busy_neighbour(core: int) -> Iterator[None]:
    """A process that keeps `core` busy while the block runs; it ends with its parent too."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(core), str(os.getpid())], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def first_core() -> int:
    return min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def loss(bench: StepBench, *, batch: int, context: int, steps: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a decode step (alone, beside a busy process)."""
    alone, beside = [], []
    for _ in range(rounds):
        bench.open(batch, context)
        alone.append(bench.decode(steps))
        with busy_neighbour(first_core()):
            beside.append(bench.decode(steps))
    return statistics.median(alone), statistics.median(beside)


def idle_share(seconds: float, *flags: str) -> float:
    """Processor time of a server (all its processes) that nobody asks anything, as a part of one core."""
    with running_server(*flags, "--no-log-requests") as server:
        main = psutil.Process(server.process.pid)
        processes = [main, *main.children(recursive=True)]
        server.get("/health")
        begin_s, begin_cpu_s = time.monotonic(), _cpu_s(processes)
        time.sleep(seconds)
        return (_cpu_s(processes) - begin_cpu_s) / (time.monotonic() - begin_s)


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(t.user + t.system for t in times))


def main() -> None:
    """A line a batch, and one for the idle server; exit 1 when that takes more than `MAX_IDLE` of a core."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    path = resolve_model(options.model)
    batches = [int(batch) for batch in options.batches.split(",")]
    bench = StepBench(path, batch=max(batches), room=options.context + 2 * options.steps + 16, threads=options.threads)
    for batch in batches:
        alone_s, beside_s = loss(bench, batch=batch, context=options.context, steps=options.steps, rounds=options.rounds)
        share = f"{1e3 * alone_s:.2f} ms alone, {1e3 * beside_s:.2f} ms beside a busy process: {beside_s / alone_s:.2f} times as long"
        print(f"decode batch {batch}: {share}", flush=True)
    bench.executor.close()
    idle = idle_share(IDLE_S, str(path))
    print(f"idle server: {idle:.2%} of a core")
    raise SystemExit(1 if idle > MAX_IDLE else 0)


if __name__ == "__main__":
    main()
