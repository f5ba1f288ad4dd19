"""`ForwardContext`: what a layer may ask of the step it runs in, without knowing the runner.

A module global, set around each forward and each capture (one Python thread runs the model of a worker; a second worker is another process).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rootlet.attention.base import AttentionBackend


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """`attention` is planned for the step; the pool and the tables behind it are its own business."""

    attention: AttentionBackend


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
