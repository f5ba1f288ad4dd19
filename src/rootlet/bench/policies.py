"""`make bench-policies`: what order of the queue, prefix cache and page size are worth, on the default model: 3 workloads x 4 policies x cache on
and off x page sizes 1, 16 and 64.

Scheduler, cache, executor and sampler in one process, tokens in and tokens out. Page sizes 16 and 64 are measured; page size 1, which would run on
the reference kernels at a fiftieth of the speed, is the same scheduler and cache on a clock that is moved by a fit of the steps measured at 16. The
fit is checked against the measured runs of page size 16.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rootlet.bench import policy_report
from rootlet.bench.calibration import exclusive
from rootlet.bench.pace import Pace
from rootlet.bench.policy_runs import Outcome, Setup, StepCosts, measured, modelled, off_by
from rootlet.bench.policy_workloads import PolicyWorkload, workloads
from rootlet.bench.sections import replace_section
from rootlet.config.load import load_config
from rootlet.config.resolve import num_usable_cores, resolve_config
from rootlet.core.step import Capacity
from rootlet.engine.model_side import load_executor, load_front
from rootlet.engine.model_source import resolve_model

POLICIES = ("fcfs", "lpm", "dfs-weight", "hrrn")
MODELLED, MEASURED = (1,), (16, 64)
POOL_LEN, CTX_LEN = 4096, 2048
PLOT = "benchmarks/policies.svg"

Results = dict[tuple[str, Setup], Outcome]


def _setups(page_size: int) -> Iterator[Setup]:
    for policy in POLICIES:
        for cache in (True, False):
            yield Setup(policy, cache, page_size)


def _measure(model: Path, works: list[PolicyWorkload], page_size: int, results: Results, costs: StepCosts) -> Capacity:
    """Every setup of this page size, one loaded model; one run before that is not counted. Returns the executor's capacity."""
    knobs = {"page_size": page_size, "max_total_tokens": POOL_LEN, "ctx_len": CTX_LEN, "max_running": 32, "depth": "1"}
    config = resolve_config(load_config({"model": str(model), **knobs}, {}, None)[0], num_cores=num_usable_cores())[0]
    executor, pace = load_executor(config, model).executor, Pace()
    try:
        measured(works[-1], Setup("fcfs", False, page_size), executor, StepCosts())
        for work in works:
            for setup in _setups(page_size):
                gc.collect()
                before = pace.take()
                results[work.name, setup] = measured(work, setup, executor, costs)
                print(_line(work.name, setup, results[work.name, setup]), f"(fixed loop {before:.0f} us)", flush=True)
        return executor.capacity
    finally:
        executor.close()


def _line(name: str, setup: Setup, outcome: Outcome) -> str:
    cache = "on" if setup.cache else "off"
    return f"{name:8} {setup.policy:10} cache {cache:3} page {setup.page_size:2}: {'  '.join(cell(outcome) for cell in policy_report.CELLS)}"


def _note(pages: tuple[int, ...], error: float, took_s: float, *, data: bool) -> str:
    text = "the data files" if data else "built-in sentences"
    return (
        f"Each cell: page sizes {' · '.join(map(str, pages))}. Text from {text}; load average at the end {os.getloadavg()[0]:.1f}; the run took "
        f"{took_s:.0f} s.\nSeconds at page size 1 are modelled; at page size 16 the model's time to the first token is off by {error:.0%} (median)."
    )


def main() -> None:
    """Print a line a run and the table; `--write FOLDER` puts table and plot there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl and mt_bench_question.jsonl; none = built-in text")
    parser.add_argument("--only", default="", help="only the workload of this name; nothing is written then")
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    options = parser.parse_args()
    begin_s, model = time.monotonic(), resolve_model(options.model)
    config = load_config({"model": str(model)}, {}, None)[0]
    tokenizer = load_front(config, model).tokenizer
    works = workloads(lambda text: list(tokenizer.encode(text)), options.data)
    works = [work for work in works if options.only in work.name]
    results, costs, unused = Results(), StepCosts(), StepCosts()
    with exclusive():
        like = _measure(model, works, MEASURED[0], results, costs)
        for page_size in MEASURED[1:]:
            _measure(model, works, page_size, results, unused)
    for work in works:
        for setup in (setup for page_size in MODELLED for setup in _setups(page_size)):
            results[work.name, setup] = modelled(work, setup, like, costs)
    again = [(results[work.name, setup], modelled(work, setup, like, costs)) for work in works for setup in _setups(MEASURED[0])]
    pages, names = MODELLED + MEASURED, [work.name for work in works]
    table = policy_report.table(results, names, POLICIES, pages)
    note = _note(pages, off_by(*zip(*again, strict=True)), time.monotonic() - begin_s, data=options.data is not None)
    print(f"\n{table}\n\n{note}")
    if options.write is not None and not options.only:
        picture = options.write / PLOT
        picture.parent.mkdir(exist_ok=True)
        picture.write_text(policy_report.plot(results, names, POLICIES, MEASURED[0]))
        alt = "Seconds to the first token by policy, with and without the prefix cache"
        replace_section(options.write / "benchmarks.md", "make bench-policies", f"![{alt}]({PLOT})\n\n{table}\n\n{note}")


if __name__ == "__main__":
    main()
