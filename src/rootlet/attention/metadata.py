"""Turns a `StepPlan` into what attention kernels read: page table, lengths, slots and the work list (architecture D7).

Owns the executor's resident page table and the static int32 buffers behind `AttentionMeta`; they never move, so a captured graph reads the new
step through the old addresses. O(tokens / 16) numpy per step, and next to nothing for a decode step of the rows of the step before. Does not read
KV, does not decide pages. Called by attention backends.
A work item is (kv head, up to 16 query tokens of one request): its tile stacks the group's heads, so each key is loaded once for the group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rootlet.attention.shared import SharedPrefixes, SharedRows
from rootlet.core.step import Capacity, StepPlan
from rootlet.core.types import ForwardMode
from rootlet.kernels.ops import AttentionMeta

QUERY_TILE = 16
ENOUGH_ITEMS = 8
"""Items that a group of rows is cut into at least, where it has so many rows: two workers that take turns then end together."""

ITEM_WORDS = 8

I32 = npt.NDArray[np.int32]


def work_items(qo_indptr: I32, prefix_lens: I32, extend_lens: I32, num_kv_heads: int) -> I32:
    """The work list of one step, [W, 8], costliest first (score count), ties in row order. qo_indptr [B+1], the lengths [B]."""
    tiles = -(-extend_lens // QUERY_TILE)
    batch = np.repeat(np.arange(len(tiles), dtype=np.int32), tiles)
    first = np.cumsum(tiles) - tiles
    begin = (np.arange(len(batch), dtype=np.int32) - first[batch]) * QUERY_TILE
    count = np.minimum(QUERY_TILE, extend_lens[batch] - begin)
    kv_len = prefix_lens[batch] + begin + count
    order = np.argsort(-(count.astype(np.int64) * kv_len), kind="stable")
    items = np.zeros((len(batch), num_kv_heads, ITEM_WORDS), np.int32)
    items[:, :, 0] = (qo_indptr[batch] + begin)[order, None]
    items[:, :, 1] = count[order, None]
    items[:, :, 2] = np.arange(num_kv_heads, dtype=np.int32)
    items[:, :, 3] = batch[order, None]
    items[:, :, 5] = kv_len[order, None]
    return items.reshape(-1, ITEM_WORDS)


def shared_items(groups: list[SharedRows], prefix_lens: I32, num_kv_heads: int) -> tuple[I32, I32]:
    """(items of rows that share leading pages, the batch indices that they name), costliest group first.

    A group is cut into parts of 8, 4 or 2 rows, so that there are enough items to go round; the parts of one kv head follow each other, so they find
    its keys in the cache.
    """
    items: list[I32] = []
    members: list[I32] = []
    begin = 0
    for group in sorted(groups, key=lambda x: -x.keys * len(x.members)):
        counts = [-(-len(group.members) // size) for size in (8, 4, 2)]
        parts = np.array_split(group.members, next((n for n in counts if n * num_kv_heads >= ENOUGH_ITEMS), counts[-1]))
        block = np.zeros((num_kv_heads, len(parts), ITEM_WORDS), np.int32)
        for i, part in enumerate(parts):
            block[:, i, 1] = len(part)
            block[:, i, 3] = part[prefix_lens[part].argmax()]
            block[:, i, 5] = prefix_lens[part].max() + 1
            block[:, i, 6] = group.keys
            block[:, i, 7] = begin
            begin += len(part)
        block[:, :, 2] = np.arange(num_kv_heads, dtype=np.int32)[:, None]
        members.append(group.members)
        items.append(block.reshape(-1, ITEM_WORDS))
    return np.concatenate(items), np.concatenate(members)


class StepTables:
    """Static buffers of one executor. Rows beyond the step's B have no query tokens (`qo_indptr` stays at T)."""

    __slots__ = (
        "_decoded_rows",
        "_num_items",
        "_num_kv_heads",
        "_num_work",
        "_order",
        "_out_cache_loc",
        "_page_table",
        "_prefix_lens",
        "_qo_indptr",
        "_row_ids",
        "_shared",
        "_work",
        "meta",
        "out_cache_loc",
    )  # fmt: skip

    def __init__(self, capacity: Capacity, num_kv_heads: int) -> None:
        rows, tokens = capacity.max_rows, capacity.max_step_tokens
        max_items = num_kv_heads * (rows + -(-tokens // QUERY_TILE))
        self._num_kv_heads = num_kv_heads
        self._decoded_rows: I32 | None = None
        self._num_items = 0
        self._shared = SharedPrefixes(rows, capacity.page_size)
        self._order = np.zeros(rows, np.int32)
        self._page_table = np.zeros((rows + 1, capacity.max_pages_per_row), np.int32)
        self._row_ids = np.zeros(rows, np.int32)
        self._qo_indptr = np.zeros(rows + 1, np.int32)
        self._prefix_lens = np.zeros(rows, np.int32)
        self._work = np.zeros((max_items, ITEM_WORDS), np.int32)
        self._num_work = np.zeros(1, np.int32)
        self._out_cache_loc = np.zeros(tokens, np.int32)
        self.out_cache_loc = torch.from_numpy(self._out_cache_loc)
        self.meta = AttentionMeta(
            page_table=torch.from_numpy(self._page_table),
            row_ids=torch.from_numpy(self._row_ids),
            qo_indptr=torch.from_numpy(self._qo_indptr),
            prefix_lens=torch.from_numpy(self._prefix_lens),
            order=torch.from_numpy(self._order),
            work=torch.from_numpy(self._work),
            num_work=torch.from_numpy(self._num_work),
            page_size=capacity.page_size,
        )

    def fill(self, plan: StepPlan) -> None:
        """Apply the plan's page deltas, then describe its rows; the buffers hold until the next `fill`."""
        for delta in plan.page_deltas:
            self._page_table[delta.pool_row, delta.start_page : delta.start_page + len(delta.pages)] = delta.pages
        if plan.pool_rows is self._decoded_rows and not self._shared.replaced(plan.page_deltas):
            self._advance(plan)
        else:
            self._describe(plan)

    def _advance(self, plan: StepPlan) -> None:
        """The rows of the step before, one token each as then: only positions differ. Work keeps its order and its
        groups, which changes no result."""
        b, items = plan.num_rows, self._work[: self._num_items]
        self._prefix_lens[:b] = plan.prefix_lens
        self._out_cache_loc[:b] = plan.out_cache_loc
        items[:, 5] = self._prefix_lens[items[:, 3]]
        items[:, 5] += 1

    def _describe(self, plan: StepPlan) -> None:
        self._decoded_rows = None  # until all of it is there
        b, t = plan.num_rows, plan.num_tokens
        np.cumsum(plan.extend_lens, out=self._qo_indptr[1 : b + 1])
        self._qo_indptr[b + 1 :] = t
        self._row_ids[:b] = plan.pool_rows
        self._prefix_lens[:b] = plan.prefix_lens
        self._row_ids[b:] = self._prefix_lens[b:] = 0
        self._out_cache_loc[:t] = plan.out_cache_loc
        self._out_cache_loc[t:] = 0
        self._fill_work(plan, b)
        self._decoded_rows = plan.pool_rows if plan.mode is ForwardMode.DECODE else None

    def _fill_work(self, plan: StepPlan, b: int) -> None:
        indptr, prefix, extend = self._qo_indptr[: b + 1], self._prefix_lens[:b], plan.extend_lens
        groups = self._shared.find(self._page_table, self._row_ids[:b], prefix, extend, plan.page_deltas)
        begin = 0
        if groups:
            items, order = shared_items(groups, prefix, self._num_kv_heads)
            begin = len(items)
            self._work[:begin] = items
            self._order[: len(order)] = order
            extend = extend.copy()
            extend[order] = 0
        items = work_items(indptr, prefix, extend, self._num_kv_heads)
        self._work[begin : begin + len(items)] = items
        self._num_work[0] = self._num_items = begin + len(items)
