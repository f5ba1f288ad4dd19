"""One captured step, replayed for every batch (architecture D9): row counts are read from the step header, so one tape serves all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rootlet.device.base import Graph
from rootlet.runner.forward_batch import ForwardBatch

Output = TypeVar("Output")


class StepGraph(Generic[Output]):
    """Captures `forward` once, over static buffers of the largest step. Its output tensors live as long as the graph and are overwritten by each
    replay. Owns `graph`."""

    __slots__ = ("_graph", "_output")

    def __init__(self, graph: Graph, forward: Callable[[], Output]) -> None:
        self._graph = graph
        with self._graph.capture():
            self._output = forward()

    def replay(self, batch: ForwardBatch) -> Output:
        """Runs the tape for the step that `batch` and the attention's buffers describe; the GIL is dropped meanwhile."""
        self._graph.replay(num_tokens=batch.num_tokens, num_logit_rows=batch.num_logit_rows)
        return self._output

    def profile(self, *, on: bool) -> dict[str, dict[str, Any]]:
        """What each kind of op took since profiling was started (`seconds` on the calling thread, `wait_s` at the barrier after it), longest first;
        then starts it anew, or stops it."""
        total: dict[str, dict[str, Any]] = {}
        for op in self._graph.times():
            entry = total.setdefault(op.name, {"calls": 0, "seconds": 0.0, "wait_s": 0.0})
            entry["calls"] += op.calls
            entry["seconds"] += op.seconds
            entry["wait_s"] += op.wait_s
        self._graph.profile(on=on)
        return dict(sorted(total.items(), key=lambda item: -(item[1]["seconds"] + item[1]["wait_s"])))

    def free(self) -> None:
        """Gives the recording and its memory back."""
        self._graph.free()
