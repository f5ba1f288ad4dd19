"""Times of single steps, below scheduler and server: prefill and decode plans straight into a `LocalExecutor`, and where the time of each op went.

Owns the plans (rows with pages of their own, greedy). Does not compare with anybody: `compare.py` does. `python -m rootlet.bench.step --profile`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rootlet.config.schema import CacheArgs, ComputeArgs, ModelArgs, RuntimeConfig, SchedulerArgs
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import RELAY, ControlOp, PageDelta, RowInit, StepPlan
from rootlet.core.types import ForwardMode
from rootlet.engine.model_source import resolve_model
from rootlet.runner.local_executor import LocalExecutor

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=None)
I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Row:
    pages: I32
    done: int
    sent: bool = False


class StepBench:
    """Pool rows 1.. of one executor, each with room for `room` positions."""

    def __init__(self, model: Path, *, batch: int, room: int, threads: int | None = None, kv_dtype: str = "auto") -> None:
        config = RuntimeConfig(
            model=ModelArgs(kv_dtype=kv_dtype),
            compute=ComputeArgs(threads=threads),
            cache=CacheArgs(max_total_tokens=batch * (room + 16)),
            scheduler=SchedulerArgs(max_running=batch),
        )
        self.executor = LocalExecutor(config, model)
        self._size = self.executor.capacity.page_size
        self._pages_per_row = -(-room // self._size)
        self.rows: list[_Row] = []
        self._step = 0

    def open(self, batch: int, context: int) -> None:
        """`batch` fresh rows with `context` computed positions each."""
        n = self._pages_per_row
        self.rows = [_Row(np.arange(1 + b * n, 1 + (b + 1) * n, dtype=np.int32), 0) for b in range(batch)]
        while any(row.done < context for row in self.rows):
            for b, row in enumerate(self.rows):
                if row.done < context:
                    self.run([(b, min(512, context - row.done))])

    def run(self, work: list[tuple[int, int]]) -> float:
        """Seconds of one step that computes `n` more positions of each named row, the plan's making included."""
        start = time.perf_counter()
        self.executor.submit(self._plan(work))
        answer = self.executor.collect()
        seconds = time.perf_counter() - start
        assert all(row.error is None for row in answer.rows)
        return seconds

    def decode(self, steps: int) -> float:
        """Median seconds of a decode step of all rows."""
        work = [(b, 1) for b in range(len(self.rows))]
        return statistics.median(self.run(work) for _ in range(steps))

    def _plan(self, work: list[tuple[int, int]]) -> StepPlan:
        self._step += 1
        inits, deltas, ids, positions, slots = [], [], [], [], []
        none = np.empty(0, np.int32)
        for b, n in work:
            row = self.rows[b]
            if not row.sent:
                inits.append(RowInit(b + 1, f"b{b}", GREEDY, (), none, none))
                deltas.append(PageDelta(b + 1, 0, row.pages))
                row.sent = True
            at = np.arange(row.done, row.done + n, dtype=np.int32)
            ids.append(np.full(1, RELAY, np.int32) if n == 1 else (at * 7 + b * 13) % 40000 + 5)
            positions.append(at)
            slots.append(row.pages[at // self._size] * self._size + at % self._size)
        begin = np.array([self.rows[b].done for b, _ in work], np.int32)
        counts = np.array([n for _, n in work], np.int32)
        for b, n in work:
            self.rows[b].done += n
        return StepPlan(
            step=self._step,
            mode=ForwardMode.DECODE if counts.max() == 1 else ForwardMode.EXTEND,
            rids=tuple(f"b{b}" for b, _ in work),
            epochs=np.zeros(len(work), np.int32),
            pool_rows=np.array([b + 1 for b, _ in work], np.int32),
            prefix_lens=begin,
            extend_lens=counts,
            sample=np.ones(len(work), np.bool_),
            input_ids=np.concatenate(ids).astype(np.int32),
            positions=np.concatenate(positions),
            out_cache_loc=np.concatenate(slots).astype(np.int32),
            page_deltas=tuple(deltas),
            row_inits=tuple(inits),
        )

    def profile(self, work: list[tuple[int, int]], steps: int) -> list[tuple[str, float, float]]:
        """(op, milliseconds a step inside it, milliseconds a step at the barriers behind it), costliest first; steps are those of `work`."""
        self.executor.control(ControlOp("profile", {"on": True}))
        for _ in range(steps):
            self.run(work)
        found = self.executor.control(ControlOp("profile", {"on": False}))
        return [(name, op["seconds"] / steps * 1e3, op["wait_s"] / steps * 1e3) for name, op in found.items()]


def _print_profile(what: str, seconds: float, ops: list[tuple[str, float, float]]) -> None:
    inside = sum(ms + wait for _, ms, wait in ops)
    if not ops:
        print(f"{what}: {seconds * 1e3:.2f} ms a step")
        return
    print(f"{what}: {seconds * 1e3:.2f} ms a step; ops {inside:.2f} ms, waiting at barriers {sum(w for *_, w in ops):.2f} ms")
    for name, ms, wait in ops:
        print(f"  {name:14} {ms:8.3f} ms  {ms / inside:6.1%}   wait {wait:7.3f} ms")


def main() -> None:
    """One line a measure; with --profile the share of each op below it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    batches = [int(b) for b in options.batches.split(",")]
    bench = StepBench(
        resolve_model(options.model),
        batch=max(batches),
        room=max(options.context + 2 * options.steps + 16, 1600),
        threads=options.threads,
        kv_dtype=options.kv_dtype,
    )
    bench.open(1, 0)
    prefill = []
    for _ in range(3):
        bench.open(1, 0)
        prefill.append(bench.run([(0, 512)]))
    bench.open(1, 0)
    seconds = statistics.median(prefill)
    _print_profile(f"prefill 512 = {512 / seconds:.0f} tok/s", seconds, bench.profile([(0, 512)], 2) if options.profile else [])
    for batch in batches:
        bench.open(batch, options.context)
        seconds = bench.decode(options.steps)
        ops = bench.profile([(b, 1) for b in range(batch)], options.steps) if options.profile else []
        _print_profile(f"decode batch {batch} = {batch / seconds:.0f} tok/s", seconds, ops)
    bench.executor.close()


if __name__ == "__main__":
    main()
