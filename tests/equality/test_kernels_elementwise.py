"""Native embedding, norms, rope, activation, add and gather against torch in float64, and the scalar definition to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from rootlet.kernels.ops import Weight

_native = pytest.importorskip("rootlet.kernels.cpu._native")
table_module = pytest.importorskip("rootlet.kernels.cpu.table")

TABLE = table_module.NativeTable()
ISAS = _native.usable_isas().split(",")
ROWS = (1, 2, 3, 5, 16, 33)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    TABLE.set_threads(2)
    yield
    _native.force_isa("auto")
    TABLE.set_threads(2)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32))


def check(op: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], x: Tensor, *, atol: float = 2e-6) -> None:
    """op(x) against `expected` in float64; equal bits in every instruction set, with one thread, row by row, and for a strided x."""
    results = []
    for isa in ISAS:
        _native.force_isa(isa)
        results.append(op(x))
    for isa, got in zip(ISAS, results, strict=True):
        assert torch.equal(got, results[0]), f"{isa} differs from scalar"
    torch.testing.assert_close(results[-1].double(), expected(x.double()), atol=atol, rtol=1e-6)
    assert torch.equal(torch.cat([op(x[i : i + 1]) for i in range(x.shape[0])]), results[-1]), "row by row"
    wide = torch.cat((random(x.shape[0], 5), x, random(x.shape[0], 3)), dim=1)
    assert torch.equal(op(wide[:, 5 : 5 + x.shape[1]]), results[-1]), "strided"
    TABLE.set_threads(1)
    assert torch.equal(op(x), results[-1]), "one thread"


@pytest.mark.parametrize("n", [1, 7, 8, 15, 16, 24, 64, 577])
def test_rms_norm(n: int) -> None:
    weight = random(n, seed=9)
    for rows in ROWS:
        check(
            lambda x: TABLE.rms_norm(x, weight, 1e-5),
            lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double(),
            random(rows, n, seed=rows, scale=3.0),
            atol=1e-5,
        )


def test_rms_norm_reduces_in_sixteen_lanes_and_a_tree() -> None:
    """The order of the sum is the definition: lanes i % 16, then +8, +4, +2, +1 apart. Rebuilt here in float32, fma done in float64."""
    x = random(1, 83, seed=4)
    lanes = np.zeros(16, np.float32)
    for i, value in enumerate(x[0].numpy().astype(np.float64)):
        lanes[i % 16] = np.float32(value * value + np.float64(lanes[i % 16]))
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    scale = np.float32(1) / np.sqrt(lanes[0] / np.float32(83) + np.float32(1e-5))
    assert np.array_equal(TABLE.rms_norm(x, torch.ones(83), 1e-5)[0].numpy(), x[0].numpy() * scale)


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 20), (9, 64)])
def test_head_norm(heads: int, dim: int) -> None:
    weight = random(dim, seed=2)

    def expected(x: Tensor) -> Tensor:
        h = x.view(x.shape[0], heads, dim)
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()).reshape(x.shape)

    for rows in (1, 5):
        check(lambda x: TABLE.head_norm(x, weight, 1e-6), expected, random(rows, heads * dim, seed=rows), atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(3, 64, 64), (2, 20, 12), (1, 8, 2)])
def test_rope(heads: int, dim: int, rotary: int, interleaved: bool) -> None:
    half = rotary // 2
    angle = torch.outer(torch.arange(50, dtype=torch.float64), 10.0 ** -torch.arange(half, dtype=torch.float64))
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).float()
    all_positions = torch.tensor([0, 49, 7, 7, 12, 3, 1], dtype=torch.int32)

    def op(x: Tensor) -> Tensor:
        """Row i of a batch stands at position i of `all_positions`; a lone row is found by its content."""
        start = 0 if x.shape[0] > 1 else int((full == x).all(dim=1).nonzero()[0, 0])
        rotated: Tensor = TABLE.rope(x, all_positions[start : start + x.shape[0]].contiguous(), cos_sin, dim, interleaved)
        return rotated

    def expected(x: Tensor) -> Tensor:
        out = x.clone().view(x.shape[0], heads, dim)
        cos, sin = cos_sin.double()[all_positions.long(), :half], cos_sin.double()[all_positions.long(), half:]
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            first, second = out[:, :, a].clone(), out[:, :, b].clone()
            out[:, :, a] = first * cos[:, i : i + 1] - second * sin[:, i : i + 1]
            out[:, :, b] = second * cos[:, i : i + 1] + first * sin[:, i : i + 1]
        return out.view(x.shape)

    full = random(7, heads * dim, seed=5)
    check(op, expected, full)


def test_silu_and_mul() -> None:
    for rows in ROWS:
        x = random(rows, 2 * 300, seed=rows, scale=5.0)
        check(TABLE.silu_and_mul, lambda x: torch.nn.functional.silu(x[:, :300]) * x[:, 300:], x)


def test_silu_at_the_ends() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30, float("nan"), float("inf")])
    for isa in ISAS:
        _native.force_isa(isa)
        got = TABLE.silu_and_mul(torch.cat((gate, torch.ones(12)))[None])[0]
        assert torch.isnan(got[10])
        assert got[11] == float("inf")
        torch.testing.assert_close(got[3:10], torch.nn.functional.silu(gate[3:10].double()).float(), rtol=1e-6, atol=1e-38)
        assert (got[:3].abs() < 1e-6).all()


def test_exp_is_accurate_over_its_range() -> None:
    """Through silu: x / silu(x) - 1 = exp(-x)."""
    x = torch.linspace(-15.0, 15.0, 4001)
    got = TABLE.silu_and_mul(torch.cat((x, torch.ones_like(x)))[None])[0]
    exact = torch.nn.functional.silu(x.double())
    error = ((got.double() - exact).abs() / exact.abs().clamp_min(1e-30))[x != 0]
    assert float(error.max()) < 3 * 2.0**-24


def test_gather_rows() -> None:
    x = random(9, 70)
    rows = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(TABLE.gather_rows(x, rows), x[rows.long()])
    assert TABLE.gather_rows(x, rows[:0]).shape == (0, 70)


@pytest.mark.parametrize("kind", table_module.KINDS)
def test_embedding(kind: str) -> None:
    dense = random(40, 96, seed=3)
    if kind in table_module.FLOAT_DTYPES:
        data = dense.to(table_module.FLOAT_DTYPES[kind])
        expected = data.float()
    else:
        blocks = quantize(dense.numpy(), gguf.GGMLQuantizationType[kind.upper()])
        data = torch.from_numpy(blocks)
        expected = torch.from_numpy(dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()]))
    ids = torch.tensor([0, 39, 5, 5, 17], dtype=torch.int32)
    for isa in ISAS:
        _native.force_isa(isa)
        assert torch.equal(TABLE.embedding(ids, Weight(kind, 40, 96, data)), expected[ids.long()])


def test_half_floats_of_every_bit_pattern_widen_alike() -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).view(1024, 64)
    ids = torch.arange(1024, dtype=torch.int32)
    for isa in ISAS:
        _native.force_isa(isa)
        got = TABLE.embedding(ids, Weight("f16", 1024, 64, halves))
        assert torch.equal(torch.nan_to_num(got, nan=-7.0), torch.nan_to_num(halves.float(), nan=-7.0))


def test_an_index_outside_its_table_gives_nan_not_a_wild_read() -> None:
    weight, x = Weight("f32", 4, 8, random(4, 8)), random(3, 8)
    got = TABLE.embedding(torch.tensor([1, -1, 4], dtype=torch.int32), weight)
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1:]).all()
    assert torch.isnan(TABLE.gather_rows(x, torch.tensor([3, -1], dtype=torch.int32))).all()
    assert torch.isnan(TABLE.rope(x, torch.tensor([9, -2, 5], dtype=torch.int32), torch.ones(5, 4), 8, False)).all()


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'mmx' is not usable here \(usable: scalar"):
        _native.force_isa("mmx")
