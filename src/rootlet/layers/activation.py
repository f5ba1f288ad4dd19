"""Gated activations of MLPs."""

from __future__ import annotations

from torch import Tensor

from rootlet.kernels import ops


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2F], gate first -> silu(gate) * up, [T, F]."""
    return ops.table().silu_and_mul(gate_up)
