"""The CPU: its graph (a tape replayed in one native call that drops the GIL, architecture D9).

Where the tape comes from is the kernels' business (`NativeTable.new_graph`): this file knows its protocol only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rootlet.device.base import OpTime


class Tape(Protocol):
    """The native tape (csrc/include/rootlet/graph.h)."""

    def __len__(self) -> int: ...

    def replay(self, num_tokens: int, num_logit_rows: int, profile: bool) -> None: ...

    def profile(self) -> list[tuple[str, int, int, int]]: ...

    def reset_profile(self) -> None: ...


class CpuGraph:
    """Satisfies `device.base.Graph`. Owns the tape, the memory of its intermediate tensors, and references to all that the tape points into."""

    __slots__ = ("_profiling", "_recorded", "_recording", "_tape")

    def __init__(self, tape: Tape, recording: Callable[[Any], AbstractContextManager[Any]]) -> None:
        """`recording(tape)` is a context in which ops append to `tape`; it yields what must be kept alive with it."""
        self._tape: Tape | None = tape
        self._recording = recording
        self._recorded: Any = None
        self._profiling = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Raises `RuntimeError` inside on torch arithmetic, which a tape cannot hold."""
        assert self._tape is not None, "the graph was freed"
        assert self._recorded is None, "a graph is captured once"
        with self._recording(self._tape) as recorded:
            self._recorded = recorded
            yield

    def replay(self, *, num_tokens: int, num_logit_rows: int) -> None:
        """One native call; other Python threads run meanwhile. Raises `ValueError` when a count is above the captured size."""
        assert self._tape is not None, "the graph was freed"
        assert self._recorded is not None, "replay needs a captured graph"
        self._tape.replay(num_tokens, num_logit_rows, self._profiling)

    def free(self) -> None:
        self._tape = None
        self._recorded = None

    def profile(self, *, on: bool) -> None:
        assert self._tape is not None, "the graph was freed"
        if on:
            self._tape.reset_profile()
        self._profiling = on

    def times(self) -> Sequence[OpTime]:
        assert self._tape is not None, "the graph was freed"
        return [OpTime(name, calls, ns * 1e-9, wait_ns * 1e-9) for name, calls, ns, wait_ns in self._tape.profile()]

    @property
    def num_ops(self) -> int:
        return 0 if self._tape is None else len(self._tape)
