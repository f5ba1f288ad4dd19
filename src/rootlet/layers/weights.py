"""Where layers get their weights from: the door between models and whatever file they came from. The implementation is `loader/weight_source.py`.

A layer asks for its tensors while it is constructed, by the names they have in a Hugging Face checkpoint, so a constructed model is a loaded model.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rootlet.kernels.ops import Weight


class WeightSource(Protocol):
    def matrix(self, names: tuple[str, ...], rows: tuple[int, ...], *, cols: int) -> Weight:
        """One matrix [sum(rows), cols] made of the named ones joined by rows, ready for `ops.linear`."""
        ...

    def table(self, name: str, *, rows: int, cols: int, also_linear: bool) -> Weight:
        """An embedding table [rows, cols] that keeps its `data`; `also_linear` makes it ready for `ops.linear` too (tied head)."""
        ...

    def vector(self, names: tuple[str, ...], rows: tuple[int, ...]) -> Tensor:
        """float32 [sum(rows)] made of the named ones joined."""
        ...
