"""Linear layers, single and fused. Which projections of a checkpoint become one matrix is said once, in `FUSED`: the loader joins their rows.

One wide matrix product a layer is faster than three narrow ones; its rows are computed one by one, so joining changes no bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from rootlet.kernels import ops
from rootlet.kernels.ops import Weight
from rootlet.layers.weights import WeightSource

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T (+ bias) (+ residual). `rows`: output features of each joined part, in the order of `FUSED`. `normed`: the input is what a
    norm made, and worth a second int8 plane where it stands out (`ops.linear`)."""

    weight: Weight
    bias: Tensor | None
    rows: tuple[int, ...]
    normed: bool = False

    @classmethod
    def load(cls, source: WeightSource, name: str, *, rows: tuple[int, ...], cols: int, bias: bool = False, normed: bool = False) -> Linear:
        """`name`: full path of the projection ("model.layers.0.self_attn.qkv_proj")."""
        prefix, _, last = name.rpartition(".")
        paths = [f"{prefix}.{part}" if prefix else part for part in FUSED.get(last, (last,))]
        weight = source.matrix(tuple(f"{path}.weight" for path in paths), rows, cols=cols)
        return cls(weight, source.vector(tuple(f"{path}.bias" for path in paths), rows) if bias else None, rows, normed=normed)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return ops.table().linear(x, self.weight, self.bias, residual, normed=self.normed)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """y [T, N] of a fused layer -> the part of each projection, as views."""
        ends = list(accumulate(self.rows))
        return tuple(y[:, end - n : end] for end, n in zip(ends, self.rows, strict=True))
