"""One captured step, replayed for every batch (architecture D9): row counts are read from the step header, so one tape serves all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from rootlet.device.base import Graph
from rootlet.kernels.ops import AttentionMeta
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

    def replay(self, batch: ForwardBatch, meta: AttentionMeta) -> Output:
        """Runs the tape for the step that `batch` and `meta` describe; the GIL is dropped meanwhile."""
        self._graph.replay(
            num_tokens=batch.num_tokens, num_rows=batch.num_rows, num_logit_rows=batch.num_logit_rows, num_work=int(meta.num_work[0])
        )
        return self._output
