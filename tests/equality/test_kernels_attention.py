"""Attention kernels: reference against float64, native against reference, and a row's bits against everything that must not touch them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from fixtures.attention_cases import Request, capacity, config, dense, plan_of, request
from rootlet.attention.metadata import StepTables
from rootlet.kernels import reference_attention
from rootlet.kv.mha import MHATokenToKVPool

HAS_NATIVE = importlib.util.find_spec("rootlet.kernels.cpu._native") is not None
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="the native library is not built")


def native_ops() -> ModuleType:
    from rootlet.kernels.cpu import attention_ops

    return attention_ops


@pytest.fixture
def isa_guard() -> Iterator[ModuleType]:
    from rootlet.kernels.cpu import _native

    yield _native
    _native.force_isa("auto")
    _native.set_team(1, False)


class Bench:
    """A pool, its tables, and one implementation of the two ops."""

    def __init__(self, ops: ModuleType, *, heads: int, kv_heads: int, dim: int, page_size: int, kv: str = "float16", num_pages: int = 160) -> None:
        self.ops, self.heads, self.kv_heads, self.dim, self.page_size, self.kv = ops, heads, kv_heads, dim, page_size, kv
        dtype = getattr(torch, kv)
        layout = "plain" if ops is reference_attention else "blocked"
        cfg = config(heads, kv_heads, dim)
        self.pool = MHATokenToKVPool(cfg, num_pages=num_pages, page_size=page_size, dtype=dtype, layout=layout)
        self.tables = StepTables(capacity(num_pages, page_size), kv_heads)
        self.scale = dim**-0.5
        self.num_pages = num_pages

    def make(self, lengths: list[int], seed: int = 0, shuffle: int = 0) -> list[Request]:
        pages = np.random.default_rng(shuffle).permutation(np.arange(1, self.num_pages + 1))
        requests, used = [], 0
        for i, n in enumerate(lengths):
            count = math.ceil(n / self.page_size)
            take = pages[used : used + count]
            used += count
            requests.append(request(i + 1, n, heads=self.heads, kv_heads=self.kv_heads, dim=self.dim, pages=take, seed=seed + i))
        return requests

    def step(self, parts: list[tuple[Request, int, int]], window: int | None = None) -> list[torch.Tensor]:
        """Store and attend positions [begin, end) of each request -> its output rows."""
        plan = plan_of(parts, self.page_size)
        self.tables.fill(plan)
        q, k, v = (torch.cat([getattr(r, name)[b:e] for r, b, e in parts]) for name in ("q", "k", "v"))
        layer = self.pool.layer(0)
        self.ops.store_kv(k, v, layer, self.tables.out_cache_loc)
        out = self.ops.attention(q, layer, self.tables.meta, self.scale, window)
        return list(out.split([e - b for _, b, e in parts]))

    def whole(self, r: Request, window: int | None = None, chunk: int = 10_000) -> torch.Tensor:
        n = r.q.shape[0]
        return torch.cat([self.step([(r, b, min(n, b + chunk))], window)[0] for b in range(0, n, chunk)])


KV_TYPES = ["float32", "float16", "int8"]
SHAPES = [(9, 3, 64), (4, 4, 16), (8, 1, 32), (7, 1, 24), (2, 2, 128), (16, 2, 8), (5, 5, 20), (14, 2, 256)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("kv", ["float32", "int8"])
@pytest.mark.parametrize("window", [None, 1, 40, 128])
def test_reference_equals_float64(heads: int, kv_heads: int, dim: int, kv: str, window: int | None) -> None:
    b = Bench(reference_attention, heads=heads, kv_heads=kv_heads, dim=dim, page_size=5, kv=kv)
    (r,) = b.make([150])
    want = dense(r, kv_heads, dim, scale=b.scale, window=window, kv=kv)
    torch.testing.assert_close(b.whole(r, window, 70).double(), want, atol=2e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("window", [None, 1, 40, 128])
def test_native_equals_float64(heads: int, kv_heads: int, dim: int, kv: str, window: int | None) -> None:
    b = Bench(native_ops(), heads=heads, kv_heads=kv_heads, dim=dim, page_size=16, kv=kv)
    (r,) = b.make([300])
    want = dense(r, kv_heads, dim, scale=b.scale, window=window, kv=kv)
    torch.testing.assert_close(b.whole(r, window, 130).double(), want, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("kv", KV_TYPES)
def test_native_equals_reference_in_a_mixed_batch(page_size: int, kv: str) -> None:
    shape = {"heads": 9, "kv_heads": 3, "dim": 64, "page_size": page_size, "kv": kv}
    a, b = Bench(native_ops(), **shape), Bench(reference_attention, **shape)
    requests = a.make([33, 257, 129, 1, 128, 300])
    first = [(r, 0, r.q.shape[0] // 2) for r in requests if r.q.shape[0] > 1]
    mixed = [(requests[1], 128, 257), (requests[5], 250, 300), (requests[3], 0, 1), (requests[0], 16, 17), (requests[4], 64, 65)]
    for parts in (first, mixed):
        for x, y in zip(a.step(parts), b.step(parts), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 33])
def test_scalar_and_simd_agree_to_the_bit(shape: tuple[int, int, int], kv: str, window: int | None, isa_guard: ModuleType) -> None:
    heads, kv_heads, dim = shape
    outs, pools = [], []
    for isa in isa_guard.usable_isas().split(","):
        isa_guard.force_isa(isa)
        b = Bench(native_ops(), heads=heads, kv_heads=kv_heads, dim=dim, page_size=32, kv=kv)
        (r,) = b.make([140])
        outs.append(b.whole(r, window, 100))
        pools.append(b.pool.layer(0))
    for out, pool in zip(outs[1:], pools[1:], strict=True):
        assert torch.equal(out.view(torch.int32), outs[0].view(torch.int32))
        assert torch.equal(pool.k, pools[0].k)
        assert torch.equal(pool.v, pools[0].v)
        if kv == "int8":
            assert torch.equal(pool.k_scales, pools[0].k_scales)
            assert torch.equal(pool.v_scales, pools[0].v_scales)


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


OPS = ["reference", pytest.param("native", marks=needs_native)]


def ops_of(name: str) -> ModuleType:
    return reference_attention if name == "reference" else native_ops()


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kv", ["float16", "int8"])
@pytest.mark.parametrize("window", [None, 50])
def test_bits_do_not_depend_on_chunking(ops: str, kv: str, window: int | None) -> None:
    def run(chunk: int) -> bytes:
        b = Bench(ops_of(ops), heads=6, kv_heads=2, dim=32, page_size=16, kv=kv)
        (r,) = b.make([200])
        return bits(b.whole(r, window, chunk))

    want = run(10_000)
    for chunk in (1, 7, 16, 64, 128):
        assert run(chunk) == want, f"chunk {chunk}"


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_bits_do_not_depend_on_batch_order_or_pages(ops: str, kv: str) -> None:
    lengths = [130, 1, 64, 200, 17, 90, 128, 33, 5, 16, 15, 129, 40, 77, 2, 256]
    shape = {"heads": 6, "kv_heads": 2, "dim": 32, "page_size": 16, "kv": kv}

    def alone(i: int) -> tuple[bytes, bytes]:
        b = Bench(ops_of(ops), **shape)
        r = b.make(lengths, shuffle=1)[i]
        n = lengths[i]
        first = b.step([(r, 0, n - 1)])[0] if n > 1 else torch.empty(0)
        return bits(first), bits(b.step([(r, n - 1, n)])[0])

    want = [alone(i) for i in range(len(lengths))]
    for seed in (2, 3):
        b = Bench(ops_of(ops), **shape)
        requests = b.make(lengths, shuffle=seed)
        order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
        prefill = [i for i in order if lengths[i] > 1]
        outs = b.step([(requests[i], 0, lengths[i] - 1) for i in prefill])
        for i, out in zip(prefill, outs, strict=True):
            assert bits(out) == want[i][0], f"prefill of {lengths[i]}"
        outs = b.step([(requests[i], lengths[i] - 1, lengths[i]) for i in order])
        for i, out in zip(order, outs, strict=True):
            assert bits(out) == want[i][1], f"decode at {lengths[i]}"


@needs_native
@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_bits_do_not_depend_on_threads_or_work_order(kv: str, isa_guard: ModuleType) -> None:
    def run(threads: int, reverse: bool) -> list[bytes]:
        isa_guard.set_team(threads, False)
        b = Bench(native_ops(), heads=6, kv_heads=2, dim=32, page_size=16, kv=kv)
        requests = b.make([130, 1, 64, 200])
        b.step([(r, 0, r.q.shape[0]) for r in requests])
        if reverse:
            n = int(b.tables.meta.num_work[0])
            b.tables.meta.work[:n] = b.tables.meta.work[:n].flip(0)
        q = torch.cat([r.q for r in requests])
        out = native_ops().attention(q, b.pool.layer(0), b.tables.meta, b.scale)
        return [bits(x) for x in out.split([r.q.shape[0] for r in requests])]

    want = run(1, False)
    assert run(2, False) == want
    assert run(2, True) == want


@needs_native
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (6, 1, 20), (4, 4, 128), (7, 1, 24)])
@pytest.mark.parametrize("window", [None, 150])
def test_few_decode_rows_split_over_the_team_keep_their_bits(heads: int, kv_heads: int, dim: int, window: int | None, isa_guard: ModuleType) -> None:
    """Alone on one thread = alone on two (cuts dealt out) = in a batch too large to split."""

    def run(threads: int, others: int) -> list[bytes]:
        isa_guard.set_team(threads, False)
        b = Bench(native_ops(), heads=heads, kv_heads=kv_heads, dim=dim, page_size=32)
        requests = b.make([700, 129, 128] + [20] * others)
        b.step([(r, 0, r.q.shape[0] - 1) for r in requests])
        last = [(r, r.q.shape[0] - 1, r.q.shape[0]) for r in requests]
        alone = [bits(b.step([part], window)[0]) for part in last[:3]]
        return alone + [bits(x) for x in b.step(last, window)[:3]]

    want = run(1, 0)
    assert want[:3] == want[3:]
    assert run(2, 0) == want
    assert run(2, 12) == want
    assert run(3, 1) == want


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_stale_nan_beyond_the_row_and_below_the_window_is_never_seen(ops: str, kv: str) -> None:
    """A page that a poisoned request left behind must not reach the next owner."""
    shape = {"heads": 3, "kv_heads": 1, "dim": 24, "page_size": 16, "kv": kv}
    clean, dirty = Bench(ops_of(ops), **shape), Bench(ops_of(ops), **shape)
    layer = dirty.pool.layer(0)
    for held in (layer.k, layer.v) if kv == "float16" else (layer.k_scales, layer.v_scales):
        held.fill_(float("nan"))
    for window in (None, 20):
        want = clean.whole(clean.make([77])[0], window, 30)
        assert bits(dirty.whole(dirty.make([77])[0], window, 30)) == bits(want)


@needs_native
def test_strided_rows_are_read_in_place() -> None:
    b = Bench(native_ops(), heads=6, kv_heads=2, dim=32, page_size=16)
    (r,) = b.make([40])
    want = b.whole(r)
    packed = torch.cat((r.q, r.k, r.v), dim=1)
    q, k, v = packed.split([192, 64, 64], dim=1)
    layer = b.pool.layer(0)
    layer.k.zero_()
    native_ops().store_kv(k, v, layer, b.tables.out_cache_loc)
    assert bits(native_ops().attention(q, layer, b.tables.meta, b.scale)) == bits(want)


@needs_native
def test_float16_rounds_to_nearest_even_with_all_specials() -> None:
    spread = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-9, 6, 4000)
    values = torch.cat((torch.tensor([0.0, -0.0, 65519.9, 65520.0, 1e30, float("inf"), 2.98e-8]), spread))
    values = torch.nn.functional.pad(values, (0, -len(values) % 16), value=1.0).view(-1, 16)
    b = Bench(native_ops(), heads=1, kv_heads=1, dim=16, page_size=16, num_pages=40)
    slots = torch.arange(16, 16 + len(values), dtype=torch.int32)
    native_ops().store_kv(values, values, b.pool.layer(0), slots)
    stored = b.pool.layer(0).v[1:].reshape(-1, 16)[: len(values)]
    assert torch.equal(stored.view(torch.int16), values.half().view(torch.int16))
    keys = b.pool.layer(0).k[1:].squeeze(2).squeeze(1).transpose(1, 2).reshape(-1, 16)[: len(values)]
    assert torch.equal(keys.view(torch.int16), values.half().view(torch.int16))


@needs_native
def test_int8_marks_a_vector_that_holds_inf_or_nan() -> None:
    """It must come out as NaN, which fails its own request, not as a plausible number."""
    b = Bench(native_ops(), heads=1, kv_heads=1, dim=16, page_size=16, kv="int8")
    values = torch.ones(4, 16)
    values[1, 3], values[2, 5], values[3] = float("inf"), float("nan"), 0.0
    layer = b.pool.layer(0)
    native_ops().store_kv(values, values, layer, torch.arange(16, 20, dtype=torch.int32))
    assert layer.v_scales is not None
    assert layer.v_scales[1, 0, :4].isnan().tolist() == [False, True, True, False]
    assert layer.v_scales[1, 0, 3] == 0.0
    assert layer.v[1, 0, 0].tolist() == [127] * 16


@needs_native
def test_a_captured_step_replays_for_every_smaller_step() -> None:
    from rootlet.kernels.cpu.table import NativeTable

    table = NativeTable()
    shape = {"heads": 6, "kv_heads": 2, "dim": 32, "page_size": 16}
    eager, b = Bench(native_ops(), **shape), Bench(native_ops(), **shape)
    q, k, v = (torch.zeros(64, n) for n in (192, 64, 64))
    graph = table.new_graph()
    with graph.capture():
        table.store_kv(k, v, b.pool.layer(0), b.tables.out_cache_loc)
        out = table.attention(q, b.pool.layer(0), b.tables.meta, b.scale)
    r, other = b.make([60, 9])
    for parts in ([(r, 0, 50), (other, 0, 9)], [(r, 50, 57)], [(other, 8, 9), (r, 57, 58)]):
        plan = plan_of(parts, 16)
        b.tables.fill(plan)
        n = plan.num_tokens
        for to, name in ((q, "q"), (k, "k"), (v, "v")):
            to[:n] = torch.cat([getattr(x, name)[begin:end] for x, begin, end in parts])
        graph.replay(num_tokens=n, num_logit_rows=0)
        assert bits(out[:n]) == bits(torch.cat(eager.step(parts)))
