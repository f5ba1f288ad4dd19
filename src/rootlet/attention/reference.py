"""Attention by the torch reference: plain K, any page size. Slow; runs where no compiler was at hand, and as the oracle of tests."""

from __future__ import annotations

from rootlet.attention.base import attention_backends
from rootlet.attention.paged import PagedAttention


@attention_backends.register("reference")
class ReferenceAttention(PagedAttention):
    """The pool must be "plain"."""

    __slots__ = ()
    layout = "plain"
