"""Block types: values against the gguf library."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from rootlet.kernels.reference_blocks import BLOCK_BYTES, dequantize_rows, quantize_activations
from rootlet.quant.gguf_blocks import common_kind, quantize_q8_0


def _values(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(rows, cols)).astype(np.float32)


@pytest.mark.parametrize("name", sorted(BLOCK_BYTES))
def test_dequantised_values_are_exact(name: str) -> None:
    data = quantize(_values(5, 96), GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(dequantize_rows(name, torch.from_numpy(data)).numpy(), dequantize(data, GGMLQuantizationType[name.upper()]))


def test_q8_0_is_within_half_a_step() -> None:
    values = _values(4, 64)
    values[1, :32] = 0.0
    back = dequantize_rows("q8_0", quantize_q8_0(torch.from_numpy(values))).numpy()
    step = np.abs(values.reshape(4, 2, 32)).max(axis=-1, keepdims=True) / 127
    assert (np.abs(back - values).reshape(4, 2, 32) <= step * 0.51 + 1e-7 + np.abs(values.reshape(4, 2, 32)) * 2**-11).all()
    assert (back[1, :32] == 0).all()


def test_q8_0_of_values_near_the_end_of_float16_saturates() -> None:
    """The scale rounds down to the smallest float16: 1.4 of it would be 178 steps."""
    smallest = 2.0**-24
    values = torch.full((1, 32), 1.4 * smallest * 127)
    values[0, 1] *= -1
    back = dequantize_rows("q8_0", quantize_q8_0(values))[0]
    assert back[:2].tolist() == [127 * smallest, -127 * smallest]


def test_activations_are_int8_with_a_scale_per_block() -> None:
    x = torch.from_numpy(_values(3, 64))
    q, d = quantize_activations(x)
    assert q.abs().max() == 127
    assert torch.equal(q, q.round())
    torch.testing.assert_close((q * d).flatten(1), x, atol=float(d.max()) * 0.5001, rtol=0)


def test_a_block_that_stands_out_after_a_norm_is_in_steps_of_a_128th() -> None:
    """By hand: tops 2, 10, 2, 2 and 2 have the mean 3.6, and only 10 is above 2.5 times that."""
    x = torch.zeros(1, 160)
    x[0, 0], x[0, 32], x[0, 33], x[0, 34], x[0, 64], x[0, 96], x[0, 128] = 2.0, 10.0, 10.0 * 0.3 / 127, 0.01, -2.0, 2.0, 2.0
    q, d = quantize_activations(x, normed=True)
    assert d.flatten().tolist() == pytest.approx([2 / 127, 10 / 127, 2 / 127, 2 / 127, 2 / 127])
    assert q[0, 1, :3].tolist() == [127.0, 38 / 128, 16 / 128]  # 0.3 * 128 = 38.4; 0.01 * 12.7 * 128 = 16.3
    assert torch.equal(q[0, 0], quantize_activations(x)[0][0, 0])
    assert quantize_activations(x)[0][0, 1, 1:3].tolist() == [0.0, 0.0]


def test_blocks_of_almost_nothing_count_as_zeros() -> None:
    q, d = quantize_activations(torch.full((1, 32), 1e-37))
    assert (q.abs().max(), d.max()) == (0.0, 0.0)


def test_common_kind_of_joined_matrices() -> None:
    assert common_kind(["q4_1", "q4_1"]) == "q4_1"
    assert common_kind(["q4_0", "q5_0", "q8_0"]) == "q8_0"
    assert common_kind(["q4_0", "bf16"]) == "f32"
