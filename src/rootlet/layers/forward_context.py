"""`ForwardContext`: what a layer may ask of the step it runs in, without knowing the runner.

A module global, set around each forward and each capture (one Python thread runs the model of a worker; a second worker is another process).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class LayerAttention(Protocol):
    """The part of an attention backend that a layer calls: write K/V of the step's tokens, then attend."""

    def attend(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """`input_ids`, `positions`: int32 [T] of the step."""

    attention: LayerAttention
    input_ids: Tensor
    positions: Tensor


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Publishes `context` to the layers for the length of one forward."""
    global _current
    previous, _current = _current, context
    try:
        yield
    finally:
        _current = previous


def current() -> ForwardContext:
    assert _current is not None, "a layer ran outside forward_context"
    return _current
