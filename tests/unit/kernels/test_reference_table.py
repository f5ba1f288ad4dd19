"""The torch reference: formulas by independent means, and a row's bits in any batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from rootlet.kernels.ops import Weight
from rootlet.kernels.reference import ReferenceTable

TABLE = ReferenceTable()


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _weight(kind: str, n: int, k: int) -> Weight:
    values = _random(n, k, seed=5)
    if kind == "f32":
        return Weight(kind, n, k, values)
    return Weight(kind, n, k, torch.from_numpy(quantize(values.numpy(), GGMLQuantizationType[kind.upper()])))


def test_linear_with_bias_and_residual() -> None:
    x, bias, residual = _random(3, 32, seed=1), _random(7, seed=2), _random(3, 7, seed=3)
    w = _weight("f32", 7, 32)
    assert w.data is not None
    expected = x.double() @ w.data.double().T + bias.double() + residual.double()
    torch.testing.assert_close(TABLE.linear(x, w, bias, residual).double(), expected, atol=1e-5, rtol=0)


def test_block_linear_quantises_activations_only() -> None:
    x, w = _random(3, 64, seed=1), _weight("q4_1", 5, 64)
    assert w.data is not None
    values = torch.from_numpy(dequantize(w.data.numpy(), GGMLQuantizationType.Q4_1)).double()
    blocks = x.double().view(3, 2, 32)
    d = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = ((blocks / d).round() * d).view(3, 64)
    torch.testing.assert_close(TABLE.linear(x, w).double(), rounded @ values.T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["f32", "q4_1"])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 40])
def test_rows_keep_their_bits_in_any_batch(kind: str, rows: int) -> None:
    w, x = _weight(kind, 48, 96), _random(40, 96, seed=9)
    whole = TABLE.linear(x, w)
    for start in range(0, 40 - rows + 1, 3):
        assert torch.equal(TABLE.linear(x[start : start + rows], w), whole[start : start + rows])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs_of_the_rotary_part(interleaved: bool) -> None:
    head_dim, rotary, angle = 6, 4, [0.3, 0.7]
    cos_sin = torch.tensor([[1.0, 1.0, 0.0, 0.0], [*map(math.cos, angle), *map(math.sin, angle)]])
    x = _random(1, 2 * head_dim)
    out = TABLE.rope(x, torch.tensor([1], dtype=torch.int32), cos_sin, head_dim, interleaved).view(2, head_dim)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for head in range(2):
        source = x.view(2, head_dim)[head].tolist()
        for (i, j), a in zip(pairs, angle, strict=True):
            assert out[head, i] == pytest.approx(source[i] * math.cos(a) - source[j] * math.sin(a), abs=1e-6)
            assert out[head, j] == pytest.approx(source[j] * math.cos(a) + source[i] * math.sin(a), abs=1e-6)
        assert out[head, rotary:].tolist() == source[rotary:]


def test_norms_and_activation() -> None:
    x, weight = _random(2, 8), _random(4, seed=1)
    heads = x.view(2, 2, 4).double()
    expected = heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(TABLE.head_norm(x, weight, 1e-5).double(), expected.view(2, 8), atol=1e-6, rtol=0)
    gate, up = x.double()[:, :4], x.double()[:, 4:]
    torch.testing.assert_close(TABLE.silu_and_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=0)


def test_embedding_dequantises_only_its_rows() -> None:
    w = _weight("q8_0", 9, 64)
    assert w.data is not None
    rows = TABLE.embedding(torch.tensor([4, 0, 4], dtype=torch.int32), w)
    np.testing.assert_array_equal(rows.numpy(), dequantize(w.data.numpy(), GGMLQuantizationType.Q8_0)[[4, 0, 4]])
