"""Work lists and static tables: every query row once per kv head, costliest first, buffers that never move."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures import attention_cases
from fixtures.attention_cases import capacity, plan_of, request
from rootlet.attention.base import attention_backends, find_backend
from rootlet.attention.cpu import CpuAttention
from rootlet.attention.metadata import StepTables, work_items
from rootlet.core.errors import BadConfig
from rootlet.core.types import ForwardMode
from rootlet.kernels import workspace
from rootlet.kernels.ops import AttentionMeta
from rootlet.kv.mha import MHATokenToKVPool

SOURCE = Path(__file__).resolve().parents[3]


def test_each_query_row_is_in_exactly_one_item_per_head() -> None:
    prefix, extend = np.array([0, 100, 7, 0], np.int32), np.array([33, 1, 16, 1], np.int32)
    indptr = np.concatenate(([0], np.cumsum(extend))).astype(np.int32)
    items = work_items(indptr, prefix, extend, 2)
    seen = np.zeros((2, extend.sum()), int)
    for q_begin, count, head, batch, kv_begin, kv_len, *_ in items.tolist():
        assert 1 <= count <= 16
        assert indptr[batch] <= q_begin
        assert q_begin + count <= indptr[batch + 1]
        assert (kv_begin, kv_len) == (0, prefix[batch] + q_begin - indptr[batch] + count)
        seen[head, q_begin : q_begin + count] += 1
    assert (seen == 1).all()
    cost = items[:, 1].astype(int) * items[:, 5]
    assert (np.diff(cost) <= 0).all()


def test_tables_stay_in_place_and_clear_what_a_smaller_step_leaves() -> None:
    tables = StepTables(capacity(8, 16, max_rows=4, max_step_tokens=64), 1)
    addresses = [t.data_ptr() for t in (tables.meta.work, tables.meta.row_ids, tables.out_cache_loc, tables.meta.page_table)]
    a = request(2, 40, heads=1, kv_heads=1, dim=8, pages=np.array([5, 1, 7]), seed=0)
    b = request(4, 10, heads=1, kv_heads=1, dim=8, pages=np.array([2]), seed=1)
    tables.fill(plan_of([(a, 0, 40), (b, 9, 10)], 16))
    assert tables.meta.num_work.tolist() == [4]
    assert tables.meta.qo_indptr.tolist() == [0, 40, 41, 41, 41]
    assert tables.meta.prefix_lens.tolist() == [0, 9, 0, 0]
    assert tables.meta.page_table[2, :3].tolist() == [5, 1, 7]
    assert tables.out_cache_loc[40:43].tolist() == [2 * 16 + 9, 0, 0]
    tables.fill(plan_of([(b, 8, 9)], 16))
    assert tables.meta.qo_indptr.tolist() == [0, 1, 1, 1, 1]
    assert tables.meta.row_ids.tolist() == [4, 0, 0, 0]
    assert (tables.meta.num_work.tolist(), tables.out_cache_loc[1:].any().item()) == ([1], False)
    assert addresses == [t.data_ptr() for t in (tables.meta.work, tables.meta.row_ids, tables.out_cache_loc, tables.meta.page_table)]


def test_every_field_that_is_filled_for_each_step_is_read_by_a_kernel() -> None:
    """One that nobody reads costs its filling, and has to be kept right for nobody."""
    kernels = "".join(path.read_text() for path in (SOURCE / "src" / "rootlet" / "kernels").rglob("*.py"))
    assert not [field.name for field in fields(AttentionMeta) if f"meta.{field.name}" not in kernels]


def test_the_row_spaces_are_those_of_the_tape_and_each_has_a_user() -> None:
    header = (SOURCE / "csrc" / "include" / "rootlet" / "tensor_args.h").read_text()
    enum = dict(re.findall(r"k(\w+) = (-?\d+)", header[header.index("enum RowSpace") :].split("}")[0]))
    assert int(enum.pop("NumRowSpaces")) == len(enum) - 1
    ours = {"Fixed": workspace.FIXED, "Tokens": workspace.TOKENS, "LogitRows": workspace.LOGIT_ROWS}
    assert {name: int(number) for name, number in enum.items()} == ours
    table = (SOURCE / "src" / "rootlet" / "kernels" / "cpu" / "table.py").read_text()
    assert all(len(re.findall(rf"\b{name}\b", table)) >= 2 for name in ("FIXED", "TOKENS", "LOGIT_ROWS")), "imported, and used"


def test_backends_are_found_by_name_and_refuse_pages_they_cannot_read() -> None:
    assert find_backend("cpu") is CpuAttention
    assert find_backend("reference").layout == "plain"
    assert attention_backends.names() == ["cpu", "reference"]
    with pytest.raises(BadConfig, match="did you mean 'reference'"):
        find_backend("refrence")
    pool = MHATokenToKVPool(attention_cases.config(1, 1, 8), num_pages=2, page_size=48, dtype=torch.float32)
    with pytest.raises(BadConfig, match="page sizes 16, 32, 64, 128, got 48"):
        CpuAttention(pool, capacity(2, 48), 1)


def test_a_step_of_the_same_rows_fills_the_tables_as_if_they_were_new() -> None:
    """Decode steps that share their `pool_rows`, over a page edge, against tables that see each step for the first time."""
    a = request(2, 60, heads=1, kv_heads=1, dim=8, pages=np.array([5, 1, 7, 9]), seed=0)
    b = request(4, 40, heads=1, kv_heads=1, dim=8, pages=np.array([2, 3, 4]), seed=1)
    kept = StepTables(capacity(12, 16, max_rows=4, max_step_tokens=64), 2)
    shared = np.array([2, 4], np.int32)
    for step in range(20):
        plan = plan_of([(a, 28 + step, 29 + step), (b, 10 + step, 11 + step)], 16)
        plan = replace(plan, mode=ForwardMode.DECODE, pool_rows=shared)
        kept.fill(plan)
        fresh = StepTables(capacity(12, 16, max_rows=4, max_step_tokens=64), 2)
        fresh.fill(plan)
        for name in ("page_table", "row_ids", "qo_indptr", "prefix_lens", "num_work"):
            assert torch.equal(getattr(kept.meta, name), getattr(fresh.meta, name)), (step, name)
        n = int(fresh.meta.num_work[0])
        assert torch.equal(kept.meta.work[:n], fresh.meta.work[:n]), step
        assert torch.equal(kept.out_cache_loc, fresh.out_cache_loc), step


def test_groups_of_rows_with_shared_pages_advance_as_if_they_were_new() -> None:
    pages = [np.array([1, 2, 3, 4, 5, 6, 7, 8, 10 + 2 * i, 11 + 2 * i]) for i in range(4)]
    rows = [request(1 + i, 160, heads=1, kv_heads=1, dim=8, pages=p, seed=i) for i, p in enumerate(pages)]
    kept = StepTables(capacity(20, 16, max_rows=4, max_step_tokens=64), 2)
    same = np.arange(1, 5, dtype=np.int32)
    for step in range(12):
        plan = plan_of([(r, 132 + 3 * i + step, 133 + 3 * i + step) for i, r in enumerate(rows)], 16)
        plan = replace(plan, mode=ForwardMode.DECODE, pool_rows=same)
        kept.fill(plan)
        fresh = StepTables(capacity(20, 16, max_rows=4, max_step_tokens=64), 2)
        fresh.fill(plan)
        n = int(fresh.meta.num_work[0])
        assert int(kept.meta.num_work[0]) == n
        assert fresh.meta.work[:n, 6].eq(128).all(), "one group, of one cut"
        assert torch.equal(kept.meta.work[:n], fresh.meta.work[:n]), step


def test_a_step_that_fails_half_way_is_not_taken_for_described() -> None:
    a = request(2, 60, heads=1, kv_heads=1, dim=8, pages=np.array([5, 1, 7, 9]), seed=0)
    tables = StepTables(capacity(12, 16, max_rows=4, max_step_tokens=64), 1)
    plan = replace(plan_of([(a, 20, 21)], 16), mode=ForwardMode.DECODE)
    tables.fill(plan)
    broken = replace(plan_of([(a, 21, 24)], 16), out_cache_loc=np.zeros(99, np.int32))
    with pytest.raises(ValueError, match="broadcast"):
        tables.fill(broken)
    tables.fill(plan)
    assert tables.meta.qo_indptr.tolist() == [0, 1, 1, 1, 1]
    assert tables.meta.prefix_lens.tolist() == [20, 0, 0, 0]
