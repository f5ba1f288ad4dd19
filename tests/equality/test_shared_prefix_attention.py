"""Rows that share leading pages are attended together (cascade): their bits are those of rows with copies of their own, in each batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from fixtures.attention_cases import Request, capacity, config, dense, plan_of, request
from rootlet.attention.metadata import StepTables
from rootlet.kv.mha import MHATokenToKVPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("rootlet.kernels.cpu._native") is None, reason="the native library is not built")

PAGE, HEADS, KV_HEADS, DIM = 16, 6, 2, 32
SHARED = 300
"""Positions that all rows have in common: 18 whole pages, two whole cuts."""


@pytest.fixture
def native() -> Iterator[ModuleType]:
    from rootlet.kernels.cpu import _native

    yield _native
    _native.force_isa("auto")
    _native.set_team(1, False)


def rows(lengths: list[int], heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> list[Request]:
    """Requests with pages of their own whose first SHARED keys and values are the same."""
    made: list[Request] = []
    begin = 1
    for i, n in enumerate(lengths):
        count = -(-n // PAGE)
        made.append(request(i + 1, n, heads=heads, kv_heads=kv_heads, dim=dim, pages=np.arange(begin, begin + count), seed=i))
        begin += count
    for r in made[1:]:
        r.k[:SHARED], r.v[:SHARED] = made[0].k[:SHARED], made[0].v[:SHARED]
    return made


def with_shared_pages(requests: list[Request], pages: int = SHARED // PAGE) -> list[Request]:
    first = requests[0].pages[:pages]
    return [replace(r, pages=np.concatenate((first, r.pages[pages:]))) for r in requests]


class Pool:
    """Keys and values of all requests but their last position, and the steps after it."""

    def __init__(self, requests: list[Request], kv: str, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> None:
        num_pages = int(max(r.pages.max() for r in requests))
        self.pool = MHATokenToKVPool(config(heads, kv_heads, dim), num_pages=num_pages, page_size=PAGE, dtype=getattr(torch, kv), layout="blocked")
        self.tables = StepTables(capacity(num_pages, PAGE, max_rows=40, max_step_tokens=20_000), kv_heads)
        self.scale = dim**-0.5
        self.step([(r, 0, r.q.shape[0] - 1) for r in requests])

    def step(self, parts: list[tuple[Request, int, int]], window: int | None = None) -> list[bytes]:
        from rootlet.kernels.cpu import attention_ops

        plan = plan_of(parts, PAGE)
        self.tables.fill(plan)
        q, k, v = (torch.cat([getattr(r, name)[b:e] for r, b, e in parts]) for name in ("q", "k", "v"))
        attention_ops.store_kv(k, v, self.pool.layer(0), self.tables.out_cache_loc)
        out = attention_ops.attention(q, self.pool.layer(0), self.tables.meta, self.scale, window)
        return [x.numpy().tobytes() for x in out.split([e - b for _, b, e in parts])]

    @property
    def shared_items(self) -> int:
        meta = self.tables.meta
        return int((meta.work[: int(meta.num_work[0]), 6] > 0).sum())


def last(requests: list[Request]) -> list[tuple[Request, int, int]]:
    return [(r, r.q.shape[0] - 1, r.q.shape[0]) for r in requests]


LENGTHS = [301 + (i * 37) % 230 for i in range(32)]


@pytest.mark.parametrize("kv", ["float32", "float16", "int8"])
@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("threads", [1, 2])
def test_shared_pages_give_the_bits_of_copies(kv: str, window: int | None, threads: int, native: ModuleType) -> None:
    native.set_team(threads, False)
    own = rows(LENGTHS)
    shared = with_shared_pages(own)
    plain, cascade = Pool(own, kv), Pool(shared, kv)
    want = plain.step(last(own), window)
    assert plain.shared_items == 0
    got = cascade.step(last(shared), window)
    assert cascade.shared_items > 0
    assert got == want


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_every_batch_from_1_to_32_gives_a_row_its_bits(kv: str, native: ModuleType) -> None:
    shared = with_shared_pages(rows(LENGTHS))
    pool = Pool(shared, kv)
    alone = [pool.step([part])[0] for part in last(shared)]
    for threads in (1, 2):
        native.set_team(threads, False)
        for n in range(1, 33):
            assert pool.step(last(shared)[:n]) == alone[:n], f"batch {n}, {threads} threads"
            assert pool.step(last(shared)[::-1][:n]) == alone[::-1][:n], f"batch {n} from the end, {threads} threads"


@pytest.mark.parametrize("kv", ["float16", "int8"])
@pytest.mark.parametrize("shape", [(6, 2, 32), (4, 4, 24), (52, 1, 16)])
def test_every_instruction_set_agrees_on_shared_items(kv: str, shape: tuple[int, int, int], native: ModuleType) -> None:
    """52 heads on one: more rows in an item than are held at once, so a request's rows are cut in two."""
    shared = with_shared_pages(rows(LENGTHS[:6], *shape))
    found = set()
    for isa in native.usable_isas().split(","):
        native.force_isa(isa)
        pool = Pool(shared, kv, *shape)
        got = pool.step(last(shared))
        assert pool.shared_items > 0
        assert got == [pool.step([part])[0] for part in last(shared)]
        found.add(b"".join(got))
    assert len(found) == 1


def test_shared_items_equal_float64() -> None:
    shared = with_shared_pages(rows(LENGTHS[:8]))
    got = Pool(shared, "float16").step(last(shared))
    for r, x in zip(shared, got, strict=True):
        want = dense(r, KV_HEADS, DIM, scale=DIM**-0.5, window=None, kv="float16")[-1].reshape(-1)
        torch.testing.assert_close(torch.from_numpy(np.frombuffer(x, np.float32).copy()).double(), want, atol=1e-5, rtol=1e-5)


def test_decode_rows_are_grouped_beside_a_prefill() -> None:
    shared = with_shared_pages(rows(LENGTHS[:6]))
    own = rows(LENGTHS[:6])
    pools = Pool(shared, "float16"), Pool(own, "float16")
    got, want = (
        pool.step([(r, r.q.shape[0] - 1 - 30 * (i == 2), r.q.shape[0]) for i, r in enumerate(made)])
        for pool, made in zip(pools, (shared, own), strict=True)
    )
    assert pools[0].shared_items > 0
    assert got == want
