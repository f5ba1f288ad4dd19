"""`make bench`: Rootlet beside llama.cpp on the same file, and on the file in llama.cpp's fastest type, in one run, interleaved A B C A B C.

Every measurement stands between two calibrations. Prints medians, ratios of medians and percent of the machine's limits; writes the record
(docs/benchmarks.json) and its part of docs/benchmarks.md (the rest is written by hand and kept). `--check` compares with the record instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rootlet.bench.calibration import Calibration, Limits, exclusive
from rootlet.bench.limits import StepCost, step_cost
from rootlet.bench.llamacpp import LlamaCpp, requantized
from rootlet.bench.report import render
from rootlet.bench.workloads import Ours, Workload, workloads
from rootlet.config.model_load import load_model_config
from rootlet.engine.engine import Engine
from rootlet.engine.model_source import resolve_model

TOLERANCE = 0.15
BATCHES = (1, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens a second, medians of the rounds; `ours_range` = (min, max). Percents of what the machine reached in the same run."""

    name: str
    ours: float
    ours_range: tuple[float, float]
    same_file: float
    best_type: float
    percent_of_bandwidth: float
    percent_of_integer_peak: float

    @property
    def ratios(self) -> tuple[float, float]:
        return self.ours / self.same_file, self.ours / self.best_type


def measure(work: Workload, peers: tuple[LlamaCpp, LlamaCpp], calibration: Calibration, *, rounds: int) -> tuple[list[float], ...]:
    """Raw tokens a second of (ours, peer on the same file, peer on its best type); one unmeasured round first."""
    sides: tuple[Callable[[], float], ...] = (work.ours, lambda: work.theirs(peers[0]), lambda: work.theirs(peers[1]))
    taken: tuple[list[float], ...] = ([], [], [])
    for turn in range(rounds + 1):
        for values, side in zip(taken, sides, strict=True):
            calibration.take()
            value = side()
            calibration.take()
            if turn:
                values.append(value)
    return taken


def judge(work: Workload, taken: tuple[list[float], ...], cost: StepCost, limits: Limits) -> Result:
    ours, same, best = (statistics.median(values) for values in taken)
    steps_per_s = ours / cost.tokens
    return Result(
        name=work.name,
        ours=round(ours, 1),
        ours_range=(round(min(taken[0]), 1), round(max(taken[0]), 1)),
        same_file=round(same, 1),
        best_type=round(best, 1),
        percent_of_bandwidth=round(100 * steps_per_s * cost.num_bytes / limits.bytes_per_s, 1),
        percent_of_integer_peak=round(100 * steps_per_s * cost.linear_macs / limits.macs_per_s, 1),
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The record of one run."""
    path = resolve_model(options.model)
    config = load_model_config(path)
    results = []
    with tempfile.TemporaryDirectory(prefix="rootlet-bench-") as folder:
        best = requantized(path, Path(folder))
        room = max(BATCHES) * 512
        peers = (
            LlamaCpp(path, threads=options.threads, context=room, sequences=max(BATCHES)),
            LlamaCpp(best, threads=options.threads, context=room, sequences=max(BATCHES)),
        )
        with Engine(model=str(path), threads=options.threads, log_requests=False, max_total_tokens=40000, kv_dtype=options.kv_dtype) as engine:
            ready = engine.manager.ready_info
            assert ready is not None, "a started engine has said what it is"
            facts = dict(ready.info)
            calibration = Calibration()
            for work in workloads(Ours(engine), batches=BATCHES):
                if options.only not in work.name:
                    continue
                taken = measure(work, peers, calibration, rounds=options.rounds)
                cost = step_cost(config, work, weights_bytes=facts["weights_bytes"], kv_dtype=facts["kv_dtype"])
                results.append(judge(work, taken, cost, calibration.best()))
                print(_line(results[-1]), flush=True)
        for peer in peers:
            peer.close()
    limits = calibration.best()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_cpu_name()}, {os.cpu_count()} CPUs, {platform.system()} {platform.machine()}, {facts['kernels']}",
        "load": [round(x, 1) for x in os.getloadavg()],
        "file": path.name,
        "threads": options.threads,
        "kv_dtype": facts["kv_dtype"],
        "rounds": options.rounds,
        "integer_gmacs": round(limits.macs_per_s / 1e9, 1),
        "read_gbytes": round(limits.bytes_per_s / 1e9, 1),
        "slowest_over_fastest": round(calibration.spread(), 2),
        "results": [asdict(r) | {"ratio_same_file": round(r.ratios[0], 2), "ratio_best_type": round(r.ratios[1], 2)} for r in results],
    }


def _line(r: Result) -> str:
    same, best = r.ratios
    limits = f"{r.percent_of_bandwidth:.0f} % of bandwidth, {r.percent_of_integer_peak:.0f} % of integer peak"
    return f"{r.name}: {r.ours:.0f} tok/s, llama.cpp {r.same_file:.0f} ({same:.2f}x), its Q4_0 {r.best_type:.0f} ({best:.2f}x); {limits}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "CPU")


def regressions(now: dict[str, Any], recorded: dict[str, Any], tolerance: float) -> list[str]:
    """Workloads whose ratio to the peer's best type fell by more than `tolerance` against the record, in words."""
    before = {r["name"]: r["ratio_best_type"] for r in recorded["results"]}
    return [
        f"{r['name']}: {r['ratio_best_type']:.2f}x, recorded {before[r['name']]:.2f}x"
        for r in now["results"]
        if r["name"] in before and r["ratio_best_type"] < before[r["name"]] * (1 - tolerance)
    ]


def main() -> None:
    """Exit 1 when --check finds a loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only workloads whose name holds this; nothing is recorded then")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of benchmarks.json and benchmarks.md")
    parser.add_argument("--check", action="store_true", help="compare with the record instead of writing it")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args()
    record = options.docs / "benchmarks.json"
    with exclusive():
        now = run(options)
    if options.check:
        lost = regressions(now, json.loads(record.read_text()), options.tolerance)
        print("\n".join(lost) or f"no ratio lost more than {options.tolerance:.0%}")
        raise SystemExit(1 if lost else 0)
    if options.only:
        return
    record.write_text(json.dumps(now, indent=1) + "\n")
    page = options.docs / "benchmarks.md"
    page.write_text(render(now, page.read_text() if page.exists() else ""))
    print(f"wrote {record} and {page}")


if __name__ == "__main__":
    main()
