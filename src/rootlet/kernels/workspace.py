"""Where ops get their output buffers from: torch outside a capture; under capture an arena that lives as long as the graph.

A captured step is a list of native calls over fixed addresses. Its intermediate tensors come from the graph's `Arena`, which hands a buffer out again
as soon as the last tensor over it (views count) is gone, so a whole model needs the memory of the few tensors that live at the same time, as in a
CUDA graph's private pool. A `Recording` also knows what each buffer's rows count (tokens, logit rows), because one tape serves every size up to the
captured maximum, and it refuses torch arithmetic, which would run once, at capture, and never again.

Owns the one current recording of the process. Does not run tapes: that is `device.Graph`. Used by `kernels.ops.empty` and the native table.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Bytes = npt.NDArray[np.uint8]

FIXED, TOKENS, LOGIT_ROWS = -1, 0, 1
"""Row spaces: what the leading dimension of a captured tensor counts (csrc/include/rootlet/tensor_args.h)."""

ALIGN = 64


class Arena:
    """Buffers that are reused once nobody looks at them. Not thread-safe; `take` is O(log free buffers)."""

    __slots__ = ("__weakref__", "_blocks", "_free", "nbytes")

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []
        self._free: list[tuple[int, int]] = []  # (size, block index), ascending
        self.nbytes = 0

    def take(self, nbytes: int) -> Bytes:
        """Uninitialised, 64-byte aligned memory that goes back to the arena when the returned array is garbage."""
        size = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        at = bisect_left(self._free, (size, 0))
        index = self._free.pop(at)[1] if at < len(self._free) else self._grow(size)
        lease = self._blocks[index][:nbytes]
        weakref.finalize(lease, self._release, index).atexit = False
        return lease

    def _grow(self, size: int) -> int:
        raw = np.empty(size + ALIGN, np.uint8)
        start = -raw.ctypes.data % ALIGN
        self._blocks.append(raw[start : start + size])
        self.nbytes += size
        return len(self._blocks) - 1

    def _release(self, index: int) -> None:
        insort(self._free, (self._blocks[index].nbytes, index))


class Quantized(NamedTuple):
    """Activations in int8 blocks: `q` [T, K], `low` [T, K] or None (the second plane, kernels/ops.py), `scales` one record a block."""

    q: Tensor
    low: Tensor | None
    scales: Tensor


class Recording:
    """What a capture under way knows. `tape` is the native tape that ops append to; `kept` must live as long as the tape."""

    __slots__ = ("_elided", "_quantized", "_spaces", "arena", "kept", "tape")

    def __init__(self, tape: Any) -> None:
        self.tape = tape
        self.arena = Arena()
        self.kept: list[Any] = []
        self._spaces: dict[int, int] = {}
        self._quantized: dict[int, dict[Any, Quantized]] = {}
        self._elided: set[int] = set()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over arena memory whose rows count tokens until `set_space` says otherwise."""
        lease = self.arena.take(math.prod(shape) * dtype.itemsize)
        address = lease.ctypes.data
        self._spaces[address] = TOKENS
        weakref.finalize(lease, self._forget, address).atexit = False
        return torch.from_numpy(lease).view(dtype).view(shape)

    def owns(self, x: Tensor) -> bool:
        """True for a tensor, or a view of one, that this recording allocated."""
        return x.untyped_storage().data_ptr() in self._spaces

    def space(self, x: Tensor) -> int:
        """What x's rows count. Static inputs from outside (ids, positions) count tokens."""
        return self._spaces.get(x.untyped_storage().data_ptr(), TOKENS)

    def set_space(self, x: Tensor, space: int) -> None:
        assert self.owns(x), "only a tensor of this recording has a row space of its own"
        self._spaces[x.untyped_storage().data_ptr()] = space

    def keep(self, *owners: Any) -> None:
        """Memory that the tape points into. Tensors of the arena are left out: their memory lives with the arena, and they may be reused."""
        self.kept.extend(o for o in owners if not (isinstance(o, Tensor) and self.owns(o)))

    def quantized(self, x: Tensor, *, normed: bool) -> Quantized | None:
        """The int8 form of x that an earlier linear recorded; it is valid as long as x lives, since arena tensors are written once."""
        return self._quantized.get(x.untyped_storage().data_ptr(), {}).get((normed, *_view_key(x)))

    def set_quantized(self, x: Tensor, made: Quantized, *, normed: bool) -> None:
        if self.owns(x):
            self._quantized.setdefault(x.untyped_storage().data_ptr(), {})[normed, *_view_key(x)] = made

    def elide(self, addresses: list[int]) -> None:
        """The tape merged ops and leaves these buffers unwritten (csrc/include/rootlet/fuse.h). Those that are garbage already are nobody's."""
        self._elided.update(a for a in addresses if a in self._spaces)

    def read(self, *tensors: Any) -> None:
        """An op reads these: whatever was left out of them is written after all."""
        for x in tensors:
            if isinstance(x, Tensor) and (address := x.untyped_storage().data_ptr()) in self._elided:
                self._elided.remove(address)
                self.tape.materialise(address)

    def finish(self) -> None:
        """Buffers that outlive the recording may be read by its owner."""
        for address in self._elided:
            self.tape.materialise(address)
        self._elided.clear()

    def _forget(self, address: int) -> None:
        self._spaces.pop(address, None)
        self._elided.discard(address)
        self._quantized.pop(address, None)


def _view_key(x: Tensor) -> tuple[Any, ...]:
    return (x.data_ptr(), *x.shape, *x.stride())


READS_VALUES = frozenset({"item", "tolist", "__bool__", "__int__", "__float__"})


class _ViewsOnly(TorchFunctionMode):
    """Raises on torch calls that compute or read values: they would run once, now, and not be on the tape. What remains are views and shapes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        result = None if in_place or name in READS_VALUES else func(*args, **(kwargs or {}))
        sources = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        outputs = [r for r in (result if isinstance(result, list | tuple) else (result,)) if isinstance(r, Tensor)]
        made_new = name != "from_numpy" and any(r.untyped_storage().data_ptr() not in sources for r in outputs)
        if in_place or name in READS_VALUES or made_new:
            raise RuntimeError(f"torch operation {name!r} under graph capture: only kernels.ops record themselves (views are fine)")
        return result


_current: Recording | None = None


def current() -> Recording | None:
    """The recording under way, or None: ops run at once."""
    return _current


def current_tape() -> Any:
    """The native tape under way, or None."""
    return None if _current is None else _current.tape


@contextmanager
def recording(tape: Any) -> Iterator[Recording]:
    """Ops inside append themselves to `tape`. One at a time in a process. Afterwards the caller owns the recording and must keep it with the tape."""
    global _current
    assert _current is None, "a capture is already under way"
    _current = Recording(tape)
    try:
        with _ViewsOnly():
            yield _current
        _current.finish()
    finally:
        _current = None


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor: from the capture's arena, else from torch."""
    if _current is None:
        return torch.empty(shape, dtype=dtype)
    return _current.allocate(shape, dtype)
