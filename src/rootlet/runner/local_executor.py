"""`LocalExecutor`: the scheduler's door to one worker in this process (architecture D2).

threaded=False: `submit` runs the step at once; the caller's thread is worker 0 of the kernel team (few cores, depth 1).
threaded=True:  a thread of its own runs steps from a queue in order; `submit` returns at once and `collect` waits (more cores, depth 2).
A step that fails fails its own rows: each gets a `RowResult.error`. A bug (any other exception) loses the executor: `collect` raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rootlet.config.schema import RuntimeConfig
from rootlet.core.errors import Unavailable, Unsupported
from rootlet.core.log import logger
from rootlet.core.step import Capacity, ControlOp, RowResult, StepPlan, StepResult
from rootlet.ipc.messages import LoadProgress
from rootlet.runner.worker import Worker, build_worker

_log = logger("runner")

MAX_DEPTH = 2
STEP_FAILURES = (RuntimeError, MemoryError, OverflowError)


class LocalExecutor:
    """Satisfies `Executor`."""

    def __init__(
        self, config: RuntimeConfig, model_path: Path, *, progress: Callable[[LoadProgress], None] | None = None, threaded: bool = False
    ) -> None:
        """Loads the model. Raises `BadModelFile`, `BadConfig`."""
        self.worker: Worker = build_worker(config, model_path, progress=progress)
        self.info: dict[str, Any] = {**self.worker.info, "threaded": threaded}
        self._in_flight: deque[StepResult | Future[StepResult]] = deque()
        self._steps = self._failed_steps = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rootlet-forward") if threaded else None

    @property
    def capacity(self) -> Capacity:
        return self.worker.capacity

    @property
    def memory_sum(self) -> tuple[str, ...]:
        return self.worker.memory_sum

    def submit(self, plan: StepPlan) -> None:
        """Runs the plan now, or queues it for the forward thread. The plan must not be changed afterwards."""
        assert len(self._in_flight) < MAX_DEPTH, f"more than {MAX_DEPTH} plans in flight"
        self._in_flight.append(self._run(plan) if self._thread is None else self._thread.submit(self._run, plan))

    def collect(self) -> StepResult:
        """Result of the oldest plan in flight. Raises `Unavailable` (engine_dead) when the forward thread met a bug."""
        assert self._in_flight, "nothing is in flight"
        oldest = self._in_flight.popleft()
        if isinstance(oldest, StepResult):
            return oldest
        error = oldest.exception()
        if error is not None:
            raise Unavailable(f"the forward thread met a bug: {error!r}", code="engine_dead") from error
        return oldest.result()

    def control(self, op: ControlOp) -> dict[str, Any]:
        """ "flush": nothing to forget, rows are rebuilt by their `RowInit`. "state": counters and facts. "profile": op times since it was switched on
        (`args`: on=True starts anew, on=False stops). Raises `Unsupported` on any other."""
        if op.name == "flush":
            return {}
        if op.name == "state":
            return {"steps": self._steps, "failed_steps": self._failed_steps, **self.info}
        graph = self.worker.runner.graph
        if op.name == "profile" and graph is not None:
            return graph.profile(on=bool(op.args.get("on", True)))
        if op.name == "profile":
            raise Unsupported("op times are measured on a recorded step, and these kernels record none (--graph, --kernels)")
        raise Unsupported(f"the local executor has no control operation {op.name!r} (known: flush, profile, state)")

    def close(self) -> None:
        """Ends the forward thread after the plans in flight and frees the recording. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.worker.runner.close()

    def _run(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        try:
            return self.worker.runner.run(plan)
        except STEP_FAILURES as error:
            self._failed_steps += 1
            _log.exception("step_failed", step=plan.step, rids=",".join(plan.rids))
            failed = RowResult(error=f"the step that computed this request failed: {error}")
            return StepResult(plan.step, (failed,) * plan.num_rows)
