"""`RadixAttention`: attention of one layer over the paged KV that the radix tree shares. It holds constants; the backend does the work."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rootlet.layers.forward_context import current


@dataclass(frozen=True, slots=True)
class RadixAttention:
    """`window`: keys visible including the query's own position, None = all. `scale` multiplies the scores."""

    layer_id: int
    scale: float
    window: int | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H * D], k, v [T, Hkv * D] -> [T, H * D]; k and v are stored at the step's slots first."""
        return current().attention.attend(self, q, k, v)
