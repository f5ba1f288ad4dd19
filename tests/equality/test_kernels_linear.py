"""Native linear layers against numpy in float64 over `gguf`'s own dequantisation, and their promise: a row's bits never depend on the batch, the
number of threads or the instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from rootlet.core.errors import BadModelFile
from rootlet.kernels.ops import Weight
from rootlet.kernels.reference import ReferenceTable

_native = pytest.importorskip("rootlet.kernels.cpu._native")
table_module = pytest.importorskip("rootlet.kernels.cpu.table")

TABLE = table_module.NativeTable()
KINDS = table_module.KINDS
FLOAT_KINDS = ("f32", "f16", "bf16")
ISAS = _native.usable_isas().split(",")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    TABLE.set_threads(2)
    yield
    _native.force_isa("auto")
    TABLE.set_threads(2)


def make_weight(kind: str, n: int, k: int, seed: int = 0) -> tuple[Weight, NDArray[Any]]:
    """A random weight and what it stands for in float64."""
    dense = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    if kind in FLOAT_KINDS:
        data = torch.from_numpy(dense).to(table_module.FLOAT_DTYPES[kind])
        return Weight(kind, n, k, data), data.to(torch.float64).numpy()
    qtype = gguf.GGMLQuantizationType[kind.upper()]
    blocks = quantize(dense, qtype)
    return Weight(kind, n, k, torch.from_numpy(blocks)), dequantize(blocks, qtype).astype(np.float64)


def activations(rows: int, k: int, seed: int = 1) -> torch.Tensor:
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    x[:, ::37] *= 8.0  # outliers, as real activations have them
    return torch.from_numpy(x)


def with_outliers(rows: int, k: int, seed: int = 1) -> torch.Tensor:
    """What norms make: in two rows of three one block stands out, not always the same, and in the third none does."""
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    for row in range(rows):
        if (row + seed) % 3:
            x[row, (row * 137 + seed * 5) % k] *= 50.0
    return torch.from_numpy(x)


def blocks_that_stand_out(x: torch.Tensor) -> NDArray[Any]:
    top = np.abs(x.numpy().reshape(x.shape[0], -1, 32)).max(axis=-1)
    out: NDArray[Any] = (top > 2.5 * top.mean(axis=1, keepdims=True)).sum(axis=1)
    return out


def int8_rounded(x: NDArray[Any], *, normed: bool = False) -> NDArray[Any]:
    """What int8 activations with one scale per 32 values keep of x; `normed`: in steps 128 times finer where a block's top is above 2.5
    times the row's mean top."""
    blocks = x.reshape(x.shape[0], -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    steps = np.where(normed & (top > 2.5 * top.mean(axis=1, keepdims=True)), np.float32(128), np.float32(1))
    kept: NDArray[Any] = np.rint(blocks * inverse * steps).astype(np.float64) / steps * (top / np.float32(127))
    return kept.reshape(x.shape)


def expected(x: torch.Tensor, kind: str, dense: NDArray[Any], *, normed: bool = False) -> NDArray[Any]:
    rows = x.numpy() if kind in FLOAT_KINDS else int8_rounded(x.numpy(), normed=normed)
    product: NDArray[Any] = rows.astype(np.float64) @ dense.T
    return product


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_matches_float64(kind: str, isa: str, normed: bool) -> None:
    _native.force_isa(isa)
    for n, k in ((16, 160), (40, 96), (7, 64), (16, 32)):
        weight, dense = make_weight(kind, n, k)
        for rows in (1, 2, 3, 4, 5, 7, 16, 33):
            x = (with_outliers if normed else activations)(rows, k)
            want = expected(x, kind, dense, normed=normed)
            got = TABLE.linear(x, weight, normed=normed).numpy()
            np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max(), rtol=0, err_msg=f"{kind} {n}x{k} T={rows}")


def test_blocks_that_stand_out_lose_a_fifth_of_what_int8_loses() -> None:
    weight, dense = make_weight("q8_0", 64, 256)
    x = with_outliers(60, 256)
    assert set(blocks_that_stand_out(x)) == {0, 1}
    exact = x.numpy().astype(np.float64) @ dense.T
    lost = [np.abs(TABLE.linear(x, weight, normed=normed).numpy() - exact).mean(axis=1) for normed in (False, True)]
    out = blocks_that_stand_out(x) == 1
    assert lost[1][out].sum() < 0.2 * lost[0][out].sum()
    assert (lost[1][~out] == lost[0][~out]).all(), "a row without such a block is as it was"


def test_the_reference_quantises_like_the_kernels() -> None:
    weight, _ = make_weight("q4_1", 40, 160)
    for x in (with_outliers(9, 160), torch.cat((with_outliers(2, 160), torch.zeros(1, 160)))):
        reference = Weight(weight.kind, weight.n, weight.k, weight.data)
        want = ReferenceTable().linear(x, reference, normed=True)
        assert torch.allclose(TABLE.linear(x, weight, normed=True), want, atol=3e-6 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_gives_the_scalar_bits(kind: str, normed: bool) -> None:
    weight, _ = make_weight(kind, 88, 352)  # two units of columns and a part, more groups than one; more blocks than share a byte of marks
    for rows in (1, 2, 3, 4, 5, 6, 9, 13, 40):
        x = (with_outliers if normed else activations)(rows, 352, seed=rows)
        results = []
        for isa in ISAS:
            _native.force_isa(isa)
            results.append(TABLE.linear(x, weight, normed=normed))
        for isa, got in zip(ISAS, results, strict=True):
            assert torch.equal(got, results[0]), f"{kind} T={rows}: {isa} differs from scalar"


def test_packing_gives_the_same_layout_in_every_instruction_set() -> None:
    for kind in KINDS:
        x, results = activations(3, 64), []
        for isa in ISAS:
            _native.force_isa(isa)
            weight, _ = make_weight(kind, 24, 64)
            TABLE.prepare_linear(weight)
            _native.force_isa("auto")
            results.append(TABLE.linear(x, weight))
        assert all(torch.equal(r, results[0]) for r in results), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_anywhere_in_a_batch(kind: str) -> None:
    weight, _ = make_weight(kind, 50, 96)
    x = activations(300, 96)  # more than two row blocks
    whole = TABLE.linear(x, weight)
    for row in (0, 1, 3, 127, 128, 130, 255, 299):
        assert torch.equal(TABLE.linear(x[row : row + 1], weight)[0], whole[row]), f"row {row} alone"
    order = torch.from_numpy(np.random.default_rng(3).permutation(300))
    assert torch.equal(TABLE.linear(x[order], weight), whole[order])
    for cut in (1, 2, 3, 5, 130):
        parts = torch.cat((TABLE.linear(x[:cut], weight), TABLE.linear(x[cut:], weight)))
        assert torch.equal(parts, whole), f"cut at {cut}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "seed"), [*((kind, None) for kind in KINDS), *((kind, seed) for kind in KINDS[3:] for seed in (6, 7))])
def test_a_row_has_the_same_bits_at_every_place_in_a_batch_of_1_to_32(kind: str, seed: int | None, isa: str) -> None:
    """One row moved through every position of every batch: each tile height, each place in a tile, both kinds of hand-out. With a seed: after a norm,
    among rows with and without blocks that stand out, a row that has none (6) or one (7)."""
    _native.force_isa(isa)
    weight, _ = make_weight(kind, 72, 96)  # two units of columns and a part
    normed, make = seed is not None, activations if seed is None else with_outliers
    others, row = make(32, 96, seed=5), make(1, 96, seed=seed or 6)
    assert not normed or list(blocks_that_stand_out(row)) == [1 if seed == 7 else 0]
    alone = TABLE.linear(row, weight, normed=normed)[0]
    for rows in range(1, 33):
        for place in range(rows):
            x = others[:rows].clone()
            x[place] = row[0]
            assert torch.equal(TABLE.linear(x, weight, normed=normed)[place], alone), f"{kind} {isa}: row {place} of {rows}"


@pytest.mark.parametrize("kind", ["f32", "q4_1", "q8_0"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_no_bit(kind: str, threads: int) -> None:
    weight, _ = make_weight(kind, 100, 64)
    inputs = [activations(rows, 64) for rows in (1, 3, 4, 150)]
    two = [TABLE.linear(x, weight) for x in inputs]
    TABLE.set_threads(threads)
    for x, reference in zip(inputs, two, strict=True):
        assert torch.equal(TABLE.linear(x, weight), reference)


@pytest.mark.parametrize("kind", ["f32", "q4_0"])
def test_bias_and_residual_are_added_after_the_product(kind: str) -> None:
    weight, _ = make_weight(kind, 21, 32)
    x, bias, wide = activations(6, 32), torch.randn(21), torch.randn(6, 30)
    residual = wide[:, 4:25]  # rows may be strided
    plain = TABLE.linear(x, weight)
    assert torch.equal(TABLE.linear(x, weight, bias), plain + bias)
    assert torch.equal(TABLE.linear(x, weight, None, residual), plain + residual)
    assert torch.equal(TABLE.linear(x, weight, bias, residual), (plain + bias) + residual)


@pytest.mark.parametrize("kind", ["f16", "q5_1"])
def test_x_may_be_a_slice_of_a_wider_matrix(kind: str) -> None:
    weight, _ = make_weight(kind, 16, 64)
    wide = activations(5, 160)
    part = wide[:, 32:96]
    assert torch.equal(TABLE.linear(part, weight), TABLE.linear(part.contiguous(), weight))


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_blocks_saturate_no_integer(isa: str) -> None:
    """Every nibble and activation at its largest: sums that must not leave int16 on the way."""
    _native.force_isa(isa)
    for kind, block_bytes, header in (("q4_1", 20, 4), ("q5_1", 24, 4), ("q8_0", 34, 2)):
        for fill in (0xFF, 0x80, 0x7F, 0x00):
            blocks = np.full((16, 2 * block_bytes), fill, np.uint8)
            for start in range(0, 2 * block_bytes, block_bytes):
                blocks[:, start : start + header] = np.array([0, 0x3C] * (header // 2), np.uint8)  # scales 1.0
            dense = dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()]).astype(np.float64)
            weight = Weight(kind, 16, 64, torch.from_numpy(blocks))
            x = torch.full((4, 64), 127.0)
            x[1] = -127.0
            x[2, ::2] = -127.0
            np.testing.assert_array_equal(TABLE.linear(x, weight).numpy(), (x.numpy().astype(np.float64) @ dense.T).astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_second_planes_saturate_no_integer(isa: str) -> None:
    """Both planes at their largest (127 - 1/2 is 126 and 64 steps: rounded to even) times the largest weights: sums of almost 2^26."""
    _native.force_isa(isa)
    for kind, header in (("q4_1", 4), ("q5_1", 4), ("q8_0", 2)):
        for fill in (0xFF, 0x80, 0x7F, 0x00):
            block = np.concatenate(
                (np.array([0, 0x3C] * (header // 2), np.uint8), np.full({"q4_1": 16, "q5_1": 20, "q8_0": 32}[kind], fill, np.uint8))
            )
            blocks = np.tile(block, (16, 4))
            dense = dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()]).astype(np.float64)
            weight = Weight(kind, 16, 128, torch.from_numpy(blocks))
            x = torch.zeros(4, 128)
            x[:, 32] = 127.0
            x[0, 33:64], x[1, 33:64], x[2, 33:64] = 126.5, -126.5, 63.5
            want = (x.numpy().astype(np.float64) @ dense.T).astype(np.float32)
            np.testing.assert_array_equal(TABLE.linear(x, weight, normed=True).numpy(), want)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_activation_shows_in_its_own_row_only(bad: float, normed: bool) -> None:
    weight, _ = make_weight("q4_1", 16, 160)
    x = with_outliers(6, 160)
    assert set(blocks_that_stand_out(x)) == {0, 1}
    clean = TABLE.linear(x, weight, normed=normed)
    x[2, 40] = bad
    got = TABLE.linear(x, weight, normed=normed)
    assert torch.isnan(got[2]).all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], clean[others])


def test_tiny_and_zero_blocks_give_finite_results() -> None:
    weight, _ = make_weight("q4_0", 16, 64)
    x = torch.zeros(3, 64)
    x[1] = 1e-40
    x[2, :32] = 3.0
    got = TABLE.linear(x, weight)
    assert torch.isfinite(got).all()
    assert torch.equal(got[0], torch.zeros(16))


def test_no_rows_and_prepare_twice() -> None:
    weight, _ = make_weight("q8_0", 20, 32)
    TABLE.prepare_linear(weight)
    packed = weight.packed
    TABLE.prepare_linear(weight)
    assert weight.packed is packed
    weight.data = None  # once packed, the file's form may go
    assert TABLE.linear(torch.empty(0, 32), weight).shape == (0, 20)
    assert TABLE.linear(torch.ones(1, 32), weight).shape == (1, 20)


def test_unknown_kinds_and_odd_widths_are_refused_by_name() -> None:
    with pytest.raises(BadModelFile, match="q3_k"):
        TABLE.prepare_linear(Weight("q3_k", 16, 256, torch.zeros(16, 110, dtype=torch.uint8)))
    with pytest.raises(BadModelFile, match="multiple of 32"):
        TABLE.prepare_linear(Weight("q4_0", 16, 48, torch.zeros(16, 27, dtype=torch.uint8)))
