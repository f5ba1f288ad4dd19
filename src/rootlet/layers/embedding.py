"""The token embedding, and the language model head, which may be the same table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rootlet.kernels import ops
from rootlet.kernels.ops import Weight
from rootlet.layers.linear import Linear
from rootlet.layers.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Embedding:
    weight: Weight

    @classmethod
    def load(cls, source: WeightSource, name: str, *, rows: int, cols: int, also_head: bool) -> Embedding:
        """`also_head`: the table serves as head too (tied), so it is made ready for `ops.linear`."""
        return cls(source.table(f"{name}.weight", rows=rows, cols=cols, also_linear=also_head))

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int32 [T] -> float32 [T, K]."""
        return ops.table().embedding(ids, self.weight)

    def as_head(self) -> Linear:
        """The tied head: logits = x @ table.T, no bias. x comes from a norm, but a second plane gains nothing here (decision 5): not `normed`."""
        return Linear(self.weight, None, (self.weight.n,))
