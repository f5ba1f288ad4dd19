"""Slots of recurrent states (Mamba, linear attention): one slot holds the whole state of one sequence at one position.

Owns which slots are free, and the list of copies that the executor has not done yet. Slot 0 is never handed out: padded lanes use it.
The executor does the operations in order, before the forward of the plan they travel with, so a slot that is freed and handed out again in
between is still read before it is written.
"""

from __future__ import annotations

import numpy as np

from rootlet.core.step import IntArray, StateOp
from rootlet.memory.page_allocator import PageAllocator


class StateAllocator:
    """Slots 1..num_slots. `grid`: states are kept at multiples of so many tokens only, what the chunked kernels of the model can stop at."""

    __slots__ = ("_unsent", "grid", "pool")

    def __init__(self, num_slots: int, grid: int) -> None:
        assert grid >= 1, f"a grid of {grid} tokens"
        self.grid = grid
        self.pool = PageAllocator(num_slots)
        self._unsent: list[StateOp] = []

    def alloc(self, src: int = 0) -> int | None:
        """A slot that will hold a copy of `src` (0 = zeros) when the next plan runs; None when all are taken."""
        slots = self.pool.alloc(1)
        if slots is None:
            return None
        slot = int(slots[0])
        self._unsent.append(StateOp(slot, src))
        return slot

    def free(self, slot: int) -> None:
        """Give `slot` back. Operations on it that are not sent yet stay: a copy out of it may be among them."""
        self.pool.free(slot_array(slot))

    def take_ops(self) -> tuple[StateOp, ...]:
        """What the executor must do before its next forward, in this order. The caller must send them all."""
        ops = tuple(self._unsent)
        self._unsent.clear()
        return ops


def slot_array(slot: int) -> IntArray:
    """One slot as the array that free lists take."""
    return np.array([slot], dtype=np.int32)
