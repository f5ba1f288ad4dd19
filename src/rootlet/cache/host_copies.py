"""Copies between the device and the host: what a backup or a load-back covers, and what its end means for the nodes.

It decides and books, over the nodes of one tree; `host_keeper` gives the units and speaks with the tier.

A copy in flight names its bottom node and the offset where it starts. Ends never move, so whatever was split meanwhile, the nodes of
[start, node.end) are exactly those that were copied, and each takes its share. cache.md 2.15.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlet.cache.actions import CacheAction, Copy, FreeHostPages, FreePages
from rootlet.cache.events import DEVICE
from rootlet.cache.host_tier import HostLock
from rootlet.cache.host_tree import HostTree
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.paths import on_device, path_from
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import PageArray, TreeLock


@dataclass(frozen=True, slots=True)
class Span:
    """Units of one component, by page of [start, node.end) of a copy, 0 where nothing is copied; a single one for what is not per page."""

    device: PageArray
    host: PageArray

    def copy(self) -> Copy:
        used = self.host != 0
        return Copy(self.device[used], self.host[used])


@dataclass(frozen=True, slots=True)
class InFlight:
    """A copy that is not acknowledged. `device_lock`, `host_lock`: keep what is read, and what the result will hang on."""

    node: UnifiedTreeNode
    start: int
    is_load: bool
    spans: dict[str, Span]
    device_lock: TreeLock
    host_lock: HostLock


class HostCopies:
    """Stateless beside the marks on nodes: who has a copy in flight keeps its `InFlight`."""

    __slots__ = ("_core", "_tree")

    def __init__(self, core: UnifiedTreeCore, tree: HostTree) -> None:
        self._core = core
        self._tree = tree

    # ---- device -> host -----------------------------------------------------------------------------------------------------------------

    def missing(self, node: UnifiedTreeNode) -> dict[str, PageArray]:
        """Component -> its device units on `node`, of what the host has no copy of."""
        found = {name: part.units(node) for name, part in self._tree.parts.items() if node.host is None or name not in node.host}
        return {name: units for name, units in found.items() if units is not None}

    def begin_backup(self, op: int, node: UnifiedTreeNode, host: dict[str, PageArray], host_lock: HostLock) -> InFlight:
        """`host`: fresh host units for all that is `missing`. `host_lock` keeps the copy of the node above, without which this one is no use."""
        node.backup_op = op
        spans = {name: Span(units.copy(), host[name]) for name, units in self.missing(node).items()}
        return InFlight(node, node.start, False, spans, self._core.lock(node), host_lock)

    def commit_backup(self, copy: InFlight, *, ok: bool) -> list[CacheAction]:
        """The copy is done, or failed: its nodes have a host copy from now on, where the node above has one too."""
        actions: list[CacheAction] = []
        for at in path_from(copy.node, copy.start):
            at.backup_op = None
            for name, span in copy.spans.items():
                units = self._share(copy, at, name, span.host)
                if units is None:
                    continue
                if ok and self._tree.may_hold(at, name):
                    actions += self._tree.hold(at, name, units)
                else:
                    actions.append(FreeHostPages(name, units))
        self._release(copy)
        return actions

    # ---- host -> device -----------------------------------------------------------------------------------------------------------------

    def wanted(self, best: UnifiedTreeNode) -> dict[str, list[UnifiedTreeNode]]:
        """What a request needs on the device to go on from `best`, and only the host has: nodes by component."""
        nodes = {self._core.full.name: path_from(best, on_device(best).end)}
        for component in self._core.others:
            lacking = [at for at in component.needs(best) if component.units(at) is None and at.host is not None and component.name in at.host]
            nodes[component.name] = lacking
        return {name: found for name, found in nodes.items() if found}

    def pending_load(self, best: UnifiedTreeNode, start: int) -> int | None:
        """A load that is in flight for some of [start, best.end); None when there is none."""
        return next((at.load_op for at in path_from(best, start) if at.load_op is not None), None)

    def begin_load(
        self,
        op: int,
        best: UnifiedTreeNode,
        wanted: dict[str, list[UnifiedTreeNode]],
        device: dict[str, PageArray],
        *,
        locks: tuple[TreeLock, HostLock],
    ) -> InFlight:
        """`device`: fresh device units for all that is `wanted`, in the order of its nodes from the shallowest down. `locks`: on the deepest node
        above that is on the device, and on the host values that are read."""
        start = locks[1].start
        spans = {}
        for name, nodes in wanted.items():
            size = (best.end - start) // self._core.page_size if self._tree.parts[name].per_page else 1
            span, at = Span(np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32)), 0
            for node in sorted(nodes, key=lambda node: node.end):
                assert node.host is not None, f"S6: {node} is not on the host"
                units = node.host[name]
                where = (node.start - start) // self._core.page_size if self._tree.parts[name].per_page else 0
                span.host[where : where + len(units)] = units
                span.device[where : where + len(units)] = device[name][at : at + len(units)]
                at += len(units)
            spans[name] = span
        for node in path_from(best, start):
            node.load_op = op
        return InFlight(best, start, True, spans, *locks)

    def commit_load(self, copy: InFlight, *, ok: bool) -> list[CacheAction]:
        """The copy is done, or failed: its nodes are on the device from now on, unless somebody brought them back meanwhile."""
        actions: list[CacheAction] = []
        for at in path_from(copy.node, copy.start):
            at.load_op = None
            for name, span in copy.spans.items():
                units = self._share(copy, at, name, span.device)
                if units is None:
                    continue
                part = self._tree.parts[name]
                if ok and part.units(at) is None and (at.full_pages is not None or name == self._core.full.name):
                    part.restore(at, units, self._core.tick)
                    if name == self._core.full.name and self._core.announce:
                        actions.append(self._tree.stored(at, DEVICE))
                else:
                    actions.append(FreePages(name, units))
        self._release(copy)
        return actions

    def _share(self, copy: InFlight, node: UnifiedTreeNode, name: str, units: PageArray) -> PageArray | None:
        """What belongs to one node of a copy; None when nothing was copied there."""
        if self._tree.parts[name].per_page:
            units = units[(node.start - copy.start) // self._core.page_size : (node.end - copy.start) // self._core.page_size]
        elif node is not copy.node:
            return None
        return units.copy() if units[0] else None

    def _release(self, copy: InFlight) -> None:
        self._tree.unlock(copy.host_lock)
        self._core.unlock(copy.device_lock)
        for at in path_from(copy.node, copy.start):
            self._tree.offer(at)
