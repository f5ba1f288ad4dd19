"""Files -> weights: joining, conversion, and refusal of whatever does not fit, by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from rootlet.core.errors import BadModelFile
from rootlet.formats.tensor import RawTensor
from rootlet.kernels.reference import ReferenceTable
from rootlet.kernels.reference_blocks import dequantize_rows
from rootlet.loader.weight_source import FileWeights


class FakeFile:
    """A `WeightFile` in memory."""

    def __init__(self, **tensors: RawTensor) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> RawTensor:
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def close(self) -> None:
        self._tensors = {}


def _values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dense(values: np.ndarray) -> RawTensor:
    return RawTensor("f32", values.shape, values)


def block(kind: str, values: np.ndarray) -> RawTensor:
    return RawTensor(kind, values.shape, quantize(values, GGMLQuantizationType[kind.upper()]))


def source_of(dtype: str = "auto", **tensors: RawTensor) -> FileWeights:
    return FileWeights(FakeFile(**tensors), ReferenceTable(), label="model.file", dtype=dtype)


def test_joined_matrices_keep_their_rows_in_order() -> None:
    a, b = _values(3, 64), _values(5, 64, seed=1)
    source = source_of(a=dense(a), b=dense(b))
    weight = source.matrix(("a", "b"), (3, 5), cols=64)
    source.finish()
    assert (weight.kind, weight.n, weight.k) == ("f32", 8, 64)
    np.testing.assert_array_equal(weight.packed.numpy(), np.concatenate((a, b)))


def test_equal_block_types_are_joined_without_conversion() -> None:
    a, b = block("q4_1", _values(3, 64)), block("q4_1", _values(5, 64, seed=1))
    source = source_of(a=a, b=b)
    weight = source.matrix(("a", "b"), (3, 5), cols=64)
    assert weight.kind == "q4_1"
    assert source.notes == ()
    assert source.num_bytes == 8 * 64 * 4  # what the reference holds: float32
    expected = np.concatenate([dequantize(x.data, GGMLQuantizationType.Q4_1) for x in (a, b)])
    np.testing.assert_array_equal(weight.packed.numpy(), expected)


def test_different_block_types_become_q8_0_and_say_so() -> None:
    source = source_of(a=block("q4_0", _values(3, 64)), b=block("q8_0", _values(5, 64, seed=1)))
    weight = source.matrix(("a", "b"), (3, 5), cols=64)
    assert weight.kind == "q8_0"
    assert source.notes == ("1 x q4_0 -> q8_0 (joined with another type)",)


def test_type_without_kernel_is_requantised_and_says_so() -> None:
    raw = RawTensor("q6_k", (2, 256), np.random.default_rng(0).integers(0, 200, size=(2, 210), dtype=np.uint8))
    raw.data[:, 208:] = np.array([0.01], np.float16).view(np.uint8)
    source = source_of(a=raw)
    weight = source.table("a", rows=2, cols=256, also_linear=False)
    assert weight.kind == "q8_0"
    assert source.notes == ("1 x q6_k -> q8_0",)
    assert weight.data is not None
    exact = dequantize(raw.data, GGMLQuantizationType.Q6_K)
    np.testing.assert_allclose(dequantize_rows("q8_0", weight.data).numpy(), exact, atol=np.abs(exact).max() / 127)


@pytest.mark.parametrize("dtype, kind", [("auto", "bf16"), ("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16")])
def test_dtype_converts_unquantised_matrices(dtype: str, kind: str) -> None:
    bits = (_values(3, 64).view(np.uint32) >> 16).astype(np.uint16)
    source = source_of(dtype, a=RawTensor("bf16", (3, 64), bits))
    weight = source.table("a", rows=3, cols=64, also_linear=False)
    assert weight.kind == kind
    assert weight.data is not None
    np.testing.assert_allclose(weight.data.to(torch.float32).numpy(), (bits.astype(np.uint32) << 16).view(np.float32), rtol=1e-3)


def test_dtype_dequantises_block_types_too() -> None:
    raw = block("q4_1", _values(3, 64))
    source = source_of("float32", a=raw)
    weight = source.table("a", rows=3, cols=64, also_linear=False)
    assert weight.kind == "f32"
    assert source.notes == ("1 x q4_1 -> f32",)
    assert weight.data is not None
    np.testing.assert_array_equal(weight.data.numpy(), dequantize(raw.data, GGMLQuantizationType.Q4_1))


def test_vectors_become_float32_copies() -> None:
    values = _values(6)
    vector = source_of(a=dense(values)).vector(("a",), (6,))
    np.testing.assert_array_equal(vector.numpy(), values)
    values[0] = 99.0
    assert vector[0] != 99.0


def test_every_problem_is_named_at_once() -> None:
    source = source_of(a=dense(_values(3, 64)), extra=dense(_values(2)))
    source.matrix(("a",), (4,), cols=64)
    source.matrix(("gone",), (4,), cols=64)
    with pytest.raises(BadModelFile) as error:
        source.finish()
    message = str(error.value)
    assert "model.file" in message
    assert "a: shape [3, 64], the model's configuration asks for [4, 64]" in message
    assert "gone [4, 64]: missing" in message
    assert "extra: the model has no place for it" in message


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float64])
def test_numbers_that_are_no_weights_are_named(dtype: type[np.generic]) -> None:
    kind = {np.int8: "i8", np.int64: "i64", np.float64: "f64"}[dtype]
    source = source_of(a=RawTensor(kind, (2, 64), np.zeros((2, 64), dtype)))
    source.matrix(("a",), (2,), cols=64)
    with pytest.raises(BadModelFile, match=f"model.file: a: type {kind}, which is no type of weights"):
        source.finish()


def test_buffers_and_a_tied_head_may_be_left_over() -> None:
    tensors = {"lm_head.weight": dense(_values(2)), "model.layers.0.self_attn.rotary_emb.inv_freq": dense(_values(2))}
    FileWeights(FakeFile(**tensors), ReferenceTable(), label="model.file").finish()


def test_progress_reaches_one() -> None:
    seen: list[float] = []
    file = FakeFile(a=dense(_values(3, 64)), b=dense(_values(4)))
    source = FileWeights(file, ReferenceTable(), label="f", progress=lambda done, name: seen.append(done))
    source.matrix(("a",), (3,), cols=64)
    source.vector(("b",), (4,))
    assert seen == [0.5, 1.0]
