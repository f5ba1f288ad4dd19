"""`make bench-python`: how much of a decode step of the whole runtime is native and how much is Python, at several batches.

Between two native calls stand the scheduler's commit and plan and the executor's preparation ("python", wall time). The front thread (text, streams)
works meanwhile and during the native call ("front", its processor time a step), which costs too where all cores are in the team.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

from rootlet.bench.workloads import Ours
from rootlet.config.load import load_config
from rootlet.config.resolve import num_usable_cores, resolve_config
from rootlet.engine.engine import Engine
from rootlet.engine.model_side import load_executor, load_front
from rootlet.engine.model_source import resolve_model
from rootlet.runner.forward_batch import ForwardBatch
from rootlet.runner.local_executor import LocalExecutor

FRONT = "rootlet-front"


@dataclass(frozen=True, slots=True)
class NativeCall:
    """Seconds on the wall clock and on the calling thread's own."""

    begin_s: float
    end_s: float
    begin_cpu_s: float
    end_cpu_s: float
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """Milliseconds, medians over the decode steps of one batch; `front_ms` is a mean."""

    batch: int
    native_ms: float
    python_ms: float
    python_cpu_ms: float
    front_ms: float

    def line(self) -> str:
        step = self.native_ms + self.python_ms
        parts = f"native {self.native_ms:.2f} ms, python {self.python_ms:.2f} ms = {self.python_ms / step:.1%}"
        return f"decode batch {self.batch}: step {step:.2f} ms: {parts}; processor: python {self.python_cpu_ms:.2f} ms, front {self.front_ms:.2f} ms"


class TimedGraph:
    """Stands before the runner's graph and notes when each replay began and ended."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.calls: list[NativeCall] = []

    def replay(self, batch: ForwardBatch) -> Any:
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        output = self._graph.replay(batch)
        self.calls.append(NativeCall(begin_s, time.perf_counter(), begin_cpu_s, time.thread_time(), batch.num_rows, batch.num_tokens))
        return output

    def free(self) -> None:
        self._graph.free()


def _front_cpu_s() -> float:
    thread = next(t for t in threading.enumerate() if t.name == FRONT)
    assert thread.ident is not None, "a started thread has an id"
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measure(ours: Ours, graph: TimedGraph, batch: int, steps: int) -> Share:
    """One run of `steps` decode steps and some; steps with prefill in them do not count."""
    graph.calls.clear()
    front_s = _front_cpu_s()
    ours.decode(batch, steps)
    front_s = _front_cpu_s() - front_s
    pairs = [(a, b) for a, b in zip(graph.calls, graph.calls[1:], strict=False) if a.rows == b.rows == a.tokens == b.tokens == batch]
    return Share(
        batch=batch,
        native_ms=1e3 * statistics.median(a.end_s - a.begin_s for a, _ in pairs),
        python_ms=1e3 * statistics.median(b.begin_s - a.end_s for a, b in pairs),
        python_cpu_ms=1e3 * statistics.median(b.begin_cpu_s - a.end_cpu_s for a, b in pairs),
        front_ms=1e3 * front_s / len(graph.calls),
    )


def main() -> None:
    """One line a batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batches", default="1,8,16,32")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    path = resolve_model(options.model)
    knobs = {"model": str(path), "threads": options.threads, "log_requests": False, "max_total_tokens": 40000}
    config = resolve_config(load_config(knobs, {}, None)[0], num_cores=num_usable_cores())[0]
    loaded = load_executor(config, path)
    assert isinstance(loaded.executor, LocalExecutor), "the model's executor runs in this process"
    runner = loaded.executor.worker.runner
    if runner.graph is None:
        raise SystemExit("steps are not recorded here (--graph, --kernels): there is no one native call to set apart")
    graph = TimedGraph(runner.graph)
    runner.graph = graph  # type: ignore[assignment]
    with Engine.over(config, loaded, load_front(config, path, fake=None)) as engine:
        ours = Ours(engine)
        for batch in map(int, options.batches.split(",")):
            ours.decode(batch, 16)
            print(measure(ours, graph, batch, options.steps).line(), flush=True)


if __name__ == "__main__":
    main()
