"""The window pages of running requests: which are borrowed, which are its own, when they go back.

In a row of the window table, in positions (all borders but the last are page-aligned):

    0        protected - W        cache_protected_len     window_released_len      window_allocated_len
    |  not read  |  the tree's, held   |  given back: cells are 0  |  the request's own       |

`slide` moves the third border, `commit` the second: window pages go to tombstones of the tree, or come from it for the same tokens.
Does not decide when to slide (the scheduler does, after each chunk and each few decoded tokens). cache.md 2.4, 2.9.
"""

from __future__ import annotations

from rootlet.cache import key as keys
from rootlet.cache.actions import CacheAction, FreePages
from rootlet.cache.components.swa import SWAComponent
from rootlet.cache.keeper import PoolKeeper
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.paths import path_from
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.cache.types import NO_PAGES, EvictReason, PageArray, ReqKvInfo
from rootlet.memory.swa_allocator import SWAAllocator


class RequestWindow:
    """`sharing`: prefixes are cached, so a whole window and the page it starts in must outlive the slide."""

    __slots__ = ("_core", "_keeper", "_page_size", "allocator", "component", "keep_len")

    def __init__(self, component: SWAComponent, allocator: SWAAllocator, *, core: UnifiedTreeCore, keeper: PoolKeeper, sharing: bool) -> None:
        self._core = core
        self._keeper = keeper
        self._page_size = core.page_size
        self.component = component
        self.allocator = allocator
        self.keep_len = component.leaf_len if sharing else component.window_len

    @property
    def private_pages(self) -> int:
        """Window pages in the hands of requests."""
        return self._keeper.private[self.component.name]

    def open(self, kv: ReqKvInfo, pages: PageArray | None) -> None:
        """A request that holds its row and the lock of a match starts with the match's `window_pages`."""
        assert kv.row is not None, f"R5: {kv} holds no row"
        self.allocator.set_row(kv.row, NO_PAGES if pages is None else pages)
        kv.window_allocated_len = kv.kv_allocated_len

    def pages_for(self, kv: ReqKvInfo, length: int) -> int:
        """Window pages that are missing for positions up to `length`."""
        return max(0, keys.num_pages(length, self._page_size) - keys.num_pages(kv.window_allocated_len, self._page_size))

    def grow(self, kv: ReqKvInfo, length: int, reason: EvictReason) -> bool:
        """Window pages up to position `length`, written to the row: all, or none and False. May evict. `kv` owns them."""
        assert kv.row is not None, f"R5: {kv} holds no row"
        missing = self.pages_for(kv, length)
        if not self._keeper.ensure(self.component.name, missing, reason):
            return False
        if missing:
            have = keys.num_pages(kv.window_allocated_len, self._page_size)
            taken = self.allocator.take(kv.row, have, have + missing)
            assert taken, f"E4: {missing} window pages were free just now"
            self._keeper.private[self.component.name] += missing
        kv.window_allocated_len = max(kv.window_allocated_len, length)
        return True

    def own_range(self, kv: ReqKvInfo) -> tuple[int, int]:
        """Page indexes [start, stop) of the row that name window pages of the request itself."""
        stop = keys.num_pages(kv.window_allocated_len, self._page_size)
        return min(max(kv.cache_protected_len, kv.window_released_len) // self._page_size, stop), stop

    def slide(self, kv: ReqKvInfo, length: int) -> None:
        """Give back what no query at position >= `length` - 1 reads, while a key of `length` tokens keeps a whole live window."""
        assert kv.row is not None, f"R5: {kv} holds no row"
        shareable = max((at for at, _ in kv.snapshots), default=length)  # with states, the key that can be shared ends at a snapshot
        target = keys.floor_len(max(min(length, shareable) - 1 - self.keep_len, 0), self._page_size)
        start, _ = self.own_range(kv)
        if target > start * self._page_size:
            self.allocator.give_back(kv.row, start, target // self._page_size)
            self._keeper.private[self.component.name] -= target // self._page_size - start
            kv.window_released_len = target

    def commit(self, kv: ReqKvInfo, node: UnifiedTreeNode) -> tuple[CacheAction, ...]:
        """The path to `node` was just inserted from the request's row: [kv.cache_protected_len, node.end) of it becomes the tree's.

        Tombstones take the request's window pages; where the tree has its own, the row is re-pointed to them and the request's are freed.
        """
        assert kv.row is not None, f"R5: {kv} holds no row"
        size, start = self._page_size, kv.cache_protected_len
        if node.end <= start:
            return ()
        own_from = max(start, kv.window_released_len)
        cells = self.allocator.table.pages(kv.row, start // size, node.end // size)
        actions: list[CacheAction] = []
        for at in path_from(node, start):
            first = (max(at.start, own_from) - start) // size
            part = slice((at.start - start) // size, (at.end - start) // size)
            self._keeper.private[self.component.name] -= max(0, part.stop - first)
            if at.swa_pages is not None:
                if first < part.stop:
                    actions.append(FreePages(self.component.name, cells[first : part.stop].copy()))
                cells[part] = at.swa_pages
            elif first < part.stop:
                if at.start < own_from:
                    self._core.split(at, own_from - at.start)
                self.component.adopt(at, cells[first : part.stop], self._core.tick)
                surplus = at.end - at.start - self.component.leaf_len
                if surplus > 0 and not at.children:
                    self._core.split(at, surplus)
        self.component.leave_behind(node)
        self.allocator.table.write(kv.row, start // size, cells)
        return tuple(actions)

    def let_go(self, kv: ReqKvInfo) -> None:
        """The request decoded a whole window past what it borrowed: it reads neither window nor state there any more. Doing so twice is once.

        The lock on the path stays. The state goes too, or a window evicted later would leave a held state behind on a tombstone.
        """
        if kv.lock is not None and kv.kv_committed_len - kv.cache_protected_len >= self.component.window_len:
            for component in self._core.others:
                component.let_go(kv.lock)

    def close(self, kv: ReqKvInfo) -> None:
        """Free the request's own window pages."""
        assert kv.row is not None, f"R5: second release of {kv}"
        self._keeper.give_back(self.component.name, self.allocator.table.pages(kv.row, *self.own_range(kv)))
        kv.window_released_len = kv.window_allocated_len = 0
