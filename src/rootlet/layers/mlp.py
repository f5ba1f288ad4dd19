"""The gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from rootlet.layers.activation import silu_and_mul
from rootlet.layers.linear import Linear
from rootlet.layers.weights import WeightSource


class GatedMLP:
    __slots__ = ("down", "gate_up")

    def __init__(self, source: WeightSource, prefix: str, *, hidden: int, inner: int, bias: bool) -> None:
        self.gate_up = Linear.load(source, f"{prefix}.gate_up_proj", rows=(inner, inner), cols=hidden, bias=bias, normed=True)
        self.down = Linear.load(source, f"{prefix}.down_proj", rows=(hidden,), cols=inner, bias=bias)

    def __call__(self, x: Tensor, *, residual: Tensor) -> Tensor:
        """x, residual [T, hidden] -> residual + mlp(x)."""
        return self.down(silu_and_mul(self.gate_up(x)), residual=residual)
