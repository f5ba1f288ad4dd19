"""Parallel samples wait for their parent's prefill, so that n choices of one prompt share one prefill through the tree."""

from __future__ import annotations

from rootlet.core.types import Finish
from rootlet.scheduler.queue import Queues
from rootlet.scheduler.req import Req


class ParallelGate:
    """Open once the parent's prompt was computed (and published), or the parent is gone, for whatever reason."""

    name = "parallel"

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def begin(self, req: Req) -> bool:
        return req.spec.parent_rid is not None and self.poll(req) is not True

    def poll(self, req: Req) -> bool | Finish:
        parent = self._queues.by_rid.get(req.spec.parent_rid or "")
        return parent is None or parent is req or parent.prefill_done

    def cancel(self, req: Req) -> None:
        """Nothing is held for a child."""
