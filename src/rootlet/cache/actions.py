"""What the tree decided and the controller must do. Data, not callbacks: the tree is testable without an allocator.

Frozen and printable. Whoever receives actions executes all of them, in order, before its next call into the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
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
class FreeHostPages:
    """As `FreePages`, for the host pool of `component`."""

    component: str
    pages: PageArray


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell whoever listens to KV events. Exists only where somebody does."""

    event: KVEvent


@dataclass(frozen=True, slots=True)
class Copy:
    """Units of one component: `host[i]` and `device[i]` belong together. int32, same length, none is 0."""

    device: PageArray
    host: PageArray


@dataclass(frozen=True, slots=True)
class BackUp:
    """Copy device -> host, after the steps that were planned before and before any that is planned later. To be acknowledged by `op`.

    Until then the cache keeps the device units as they are, and nobody else has the host units.
    """

    op: int
    copies: Mapping[str, Copy]


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Copy host -> device, with the order among steps of `BackUp`. To be acknowledged by `op`; nobody reads the device units before."""

    op: int
    copies: Mapping[str, Copy]


CacheAction: TypeAlias = FreePages | FreeHostPages | Announce
HostCopy: TypeAlias = BackUp | LoadBack
