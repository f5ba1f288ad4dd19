"""RMS normalisation: of a whole row, or of each head of a row on its own (Qwen3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rootlet.kernels import ops
from rootlet.layers.weights import WeightSource


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: Tensor
    eps: float

    @classmethod
    def load(cls, source: WeightSource, name: str, *, size: int, eps: float) -> RMSNorm:
        return cls(source.vector((f"{name}.weight",), (size,)), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, size] -> [T, size]."""
        return ops.table().rms_norm(x, self.weight, self.eps)

    def per_head(self, x: Tensor) -> Tensor:
        """x [T, heads * size] -> the same, each head normalised."""
        return ops.table().head_norm(x, self.weight, self.eps)
