"""The state slots of running requests: the working state that each step rewrites, and snapshots of it that the tree can take over.

The working state always encodes `kv_committed_len` tokens: a step that is planned counts, since every copy out of the slot travels with a later
plan. A snapshot is such a copy, taken at a multiple of the grid (a chunk's end, or some decoded token), so no kernel has to keep one. The tree
keeps states where a snapshot was shared and nowhere else; so what can be shared of a request ends at a snapshot. cache.md 2.2, 2.7, 2.8.
"""

from __future__ import annotations

from rootlet.cache.actions import CacheAction, FreePages
from rootlet.cache.components.mamba import MambaComponent
from rootlet.cache.keeper import PoolKeeper
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import EvictReason, ReqKvInfo
from rootlet.memory.state_allocator import StateAllocator, slot_array

MAX_SNAPSHOTS = 2


class RequestStates:
    """Every slot it takes may evict a state of the tree; when none can be had it says so and nothing changes."""

    __slots__ = ("_core", "_keeper", "allocator", "component")

    def __init__(self, component: MambaComponent, allocator: StateAllocator, *, core: UnifiedTreeCore, keeper: PoolKeeper) -> None:
        assert allocator.grid % core.page_size == 0, f"states every {allocator.grid} tokens do not fall on pages of {core.page_size}"
        self._core = core
        self._keeper = keeper
        self.allocator = allocator
        self.component = component

    @property
    def private_slots(self) -> int:
        """Slots in the hands of requests."""
        return self._keeper.private[self.component.name]

    def open(self, kv: ReqKvInfo, node: UnifiedTreeNode) -> bool:
        """A working state for a request that goes on from `node`, which it has locked: a copy of the state there. False when there is no slot.

        The caller owes `close` from now on, also when the request is not admitted after all.
        """
        assert kv.state_slot is None, f"C4: {kv} has a working state already"
        assert node.end == 0 or node.state_slot is not None, f"S6: {node} has no state to go on from"
        kv.state_slot = self._take(node.state_slot or 0, EvictReason.ADMISSION)
        return kv.state_slot is not None

    def snapshot(self, kv: ReqKvInfo) -> bool:
        """Keep a copy of the working state as it is after kv_committed_len tokens. Of more than two the oldest goes. False when nothing was kept:
        not on the grid, in the tree already, or no slot."""
        at = kv.kv_committed_len
        if kv.state_slot is None or at % self.allocator.grid or at <= kv.cache_protected_len:
            return False
        if any(length == at for length, _ in kv.snapshots):
            return True
        slot = self._take(kv.state_slot, EvictReason.SNAPSHOT)
        if slot is None:
            return False
        kv.snapshots.append((at, slot))
        if len(kv.snapshots) > MAX_SNAPSHOTS:
            self._free(kv.snapshots.pop(0)[1])
        return True

    def shareable_len(self, kv: ReqKvInfo, limit: int, *, final: bool) -> int:
        """The longest length <= `limit` that can be shared with its state, 0 for none. May take a snapshot, unless the request ends here
        (`final`) and can hand its working state over."""
        at = kv.kv_committed_len
        on_grid = kv.state_slot is not None and kv.cache_protected_len < at <= limit and at % self.allocator.grid == 0
        if on_grid and (final or self.snapshot(kv)):
            return at
        return max((length for length, _ in kv.snapshots if length <= limit), default=0)

    def commit(self, kv: ReqKvInfo, node: UnifiedTreeNode) -> tuple[CacheAction, ...]:
        """The path to `node` was just inserted; `shareable_len` said where it ends. Its state becomes the tree's, unless it has one."""
        slot = self._donate(kv, node.end)
        self._keeper.private[self.component.name] -= 1
        if node.state_slot is not None:
            return (FreePages(self.component.name, slot_array(slot)),)
        self.component.adopt(node, slot, self._core.tick)
        return ()

    def close(self, kv: ReqKvInfo) -> None:
        """Free all slots of the request; nothing when it has none."""
        for _, slot in kv.snapshots:
            self._free(slot)
        if kv.state_slot is not None:
            self._free(kv.state_slot)
        kv.snapshots, kv.state_slot = [], None

    def _donate(self, kv: ReqKvInfo, length: int) -> int:
        """Take the state after `length` tokens away from the request; older snapshots are of no more use and go."""
        for at, slot in list(kv.snapshots):
            if at <= length:
                kv.snapshots.remove((at, slot))
                if at == length:
                    return slot
                self._free(slot)
        assert kv.state_slot is not None, f"S6: {kv} has no state after {length} tokens"
        assert kv.kv_committed_len == length, f"S6: the working state of {kv} does not end at {length}"
        slot, kv.state_slot = kv.state_slot, None
        return slot

    def _take(self, src: int, reason: EvictReason) -> int | None:
        if not self._keeper.ensure(self.component.name, 1, reason):
            return None
        self._keeper.private[self.component.name] += 1
        return self.allocator.alloc(src)

    def _free(self, slot: int) -> None:
        self.allocator.free(slot)
        self._keeper.private[self.component.name] -= 1
