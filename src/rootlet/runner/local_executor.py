"""`LocalExecutor`: the scheduler's door to one worker in this process (architecture D2).

threaded=False: `submit` runs the step at once; the caller's thread is worker 0 of the kernel team (few cores, depth 1).
threaded=True:  a thread of its own runs steps from a queue in order; `submit` returns at once and `collect` waits (more cores, depth 2).
A step that fails fails its own rows: each gets a `RowResult.error`. A bug (any other exception) loses the executor: `collect` raises.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rootlet.config.schema import RuntimeConfig
from rootlet.core.errors import Unavailable, Unsupported
from rootlet.core.step import Capacity, ControlOp, RowResult, StepPlan, StepResult
from rootlet.ipc.messages import LoadProgress
from rootlet.runner.worker import Worker, build_worker

_log = logging.getLogger(__name__)

MAX_DEPTH = 2
STEP_FAILURES = (RuntimeError, MemoryError, OverflowError)


class LocalExecutor:
    """Satisfies `Executor`."""

    def __init__(
        self, config: RuntimeConfig, model_path: Path, *, progress: Callable[[LoadProgress], None] | None = None, threaded: bool = False
    ) -> None:
        """Loads the model. Raises `BadModelFile`, `BadConfig`."""
        self._start(build_worker(config, model_path, progress=progress), threaded=threaded)

    def _start(self, worker: Worker, *, threaded: bool) -> None:
        self.worker = worker
        self.info: dict[str, Any] = {**worker.info, "threaded": threaded}
        self._results: deque[StepResult] = deque()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._in_flight = 0
        self._steps = self._failed_steps = 0
        self._thread = threading.Thread(target=self._serve, name="rootlet-forward", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    @property
    def capacity(self) -> Capacity:
        return self.worker.capacity

    @property
    def memory_sum(self) -> tuple[str, ...]:
        return self.worker.memory_sum

    def submit(self, plan: StepPlan) -> None:
        """Runs the plan now, or queues it for the forward thread. The plan must not be changed afterwards."""
        assert self._in_flight < MAX_DEPTH, f"more than {MAX_DEPTH} plans in flight"
        self._in_flight += 1
        if self._thread is None:
            self._results.append(self._run(plan))
        else:
            self._plans.put(plan)

    def collect(self) -> StepResult:
        """Result of the oldest plan in flight. Raises `Unavailable` (engine_dead) once the forward thread has died."""
        assert self._in_flight > 0, "nothing is in flight"
        self._in_flight -= 1
        if self._thread is None:
            return self._results.popleft()
        answer = self._done.get()
        if isinstance(answer, BaseException):
            self._done.put(answer)
            raise Unavailable(f"the forward thread died: {answer!r}", code="engine_dead") from answer
        return answer

    def control(self, op: ControlOp) -> dict[str, Any]:
        """Call with nothing in flight. "flush": nothing to forget, rows are rebuilt by their `RowInit`. "state": counters and facts. "profile": op
        times since it was switched on (`args`: on=True starts anew, on=False stops). Raises `Unsupported` on any other."""
        assert self._in_flight == 0, "control with plans in flight"
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
            self._plans.put(None)
            self._thread.join()
            self._thread = None
        self.worker.runner.close()

    def _run(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        try:
            return self.worker.runner.run(plan)
        except STEP_FAILURES as error:
            self._failed_steps += 1
            _log.exception("step_failed step=%d rids=%s", plan.step, ",".join(plan.rids))
            failed = RowResult(error=f"the step that computed this request failed: {error}")
            return StepResult(plan.step, (failed,) * plan.num_rows)

    def _serve(self) -> None:
        """The forward thread: plans in, results out, in order; whatever escapes is handed to `collect`."""
        while (plan := self._plans.get()) is not None:
            try:
                self._done.put(self._run(plan))
            except BaseException as error:
                self._done.put(error)
                return
