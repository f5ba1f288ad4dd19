"""What decode steps have in common while their rows stay the same: made once, shared by the plans of the run.

Only positions, token ids and slots differ from one step to the next, and a slot is the one after the last as long as no row crosses a page edge: the
page that is being written is nobody else's, so nothing can have moved it. Arrays are shared between plans and never written again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rootlet.cache.unified_radix_cache import UnifiedRadixCache
from rootlet.core.step import IntArray
from rootlet.scheduler.plan_memory import slots_at
from rootlet.scheduler.req import Req


class DecodeRun:
    """The rows of `reqs` as of their epochs; all of them hold a row."""

    __slots__ = ("_left", "_reqs", "_slots", "_step", "_versions", "all_drawn", "epochs", "ones", "pool_rows", "rids")

    def __init__(self, reqs: Sequence[Req]) -> None:
        self._reqs = list(reqs)
        self._versions = [req.epoch for req in reqs]
        self._step = -2
        self._left = 0
        self._slots: IntArray | None = None
        self.rids = tuple(req.rid for req in reqs)
        self.epochs: IntArray = np.array(self._versions, dtype=np.int32)
        self.pool_rows: IntArray = np.array([req.kv.row for req in reqs], dtype=np.int32)
        self.ones: IntArray = np.ones(len(reqs), dtype=np.int32)
        self.all_drawn: npt.NDArray[np.bool_] = np.ones(len(reqs), dtype=np.bool_)

    def covers(self, reqs: Sequence[Req]) -> bool:
        """True for the same requests in the same order, none of them retracted since."""
        return reqs == self._reqs and [req.epoch for req in reqs] == self._versions

    def slots(self, cache: UnifiedRadixCache, positions: IntArray, step: int) -> IntArray:
        """[B] slots of the tokens that plan `step` computes at `positions`."""
        if self._slots is not None and step == self._step + 1 and self._left > 0:
            self._slots = self._slots + 1
            self._left -= 1
        else:
            self._slots = slots_at(cache, self.pool_rows, positions)
            self._left = cache.page_size - 1 - int(np.maximum.reduce(positions % cache.page_size))
        self._step = step
        return self._slots
