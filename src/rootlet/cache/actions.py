"""What the tree decided and the controller must do. Data, not callbacks: the tree is testable without an allocator.

Frozen and printable. Whoever receives actions executes all of them, in order, before its next call into the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rootlet.cache.events import KVEvent
from rootlet.cache.types import PageArray


@dataclass(frozen=True, slots=True)
class FreePages:
    """Give `pages` back to the allocator of `component`; nobody else names them any more (a row that did is re-pointed first)."""

    component: str
    pages: PageArray


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell whoever listens to KV events. Exists only where somebody does."""

    event: KVEvent


CacheAction: TypeAlias = FreePages | Announce
