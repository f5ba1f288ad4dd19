"""Weights as they lie in a file: a kind, a shape and a memory-mapped numpy array. Both formats produce these.

Owns the vocabulary of kinds and the way back to float32 (through the `gguf` library). Does not open files and knows no model.
Called by `formats.gguf_weights`, `formats.safetensors`, the loader and tests.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as _dequantize_blocks

from rootlet.core.errors import BadModelFile

Array = npt.NDArray[Any]

PLAIN_DTYPES: dict[str, type[np.generic]] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "f64": np.float64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """`kind`: f32, f16, bf16 (`data` is uint16) with `data.shape == shape`, or a GGUF block type (q4_0, q6_k ...) with `data` uint8
    [product of the leading dims, row bytes]. `data` is a private copy-on-write map: it stays valid after `close`, and writing to it
    never reaches the file."""

    kind: str
    shape: tuple[int, ...]
    data: Array


class WeightFile(Protocol):
    """All weights of one model under Hugging Face names, whatever files they lie in. `label` = file or folder name, for messages."""

    label: str

    def names(self) -> list[str]:
        """Every tensor that `get` can return."""
        ...

    def get(self, name: str) -> RawTensor:
        """The tensor `name`, not copied. Raises: BadModelFile naming the file and the tensor if there is none or its type is not known."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of `name` without touching its data. Raises: BadModelFile as `get`."""
        ...

    def kind(self, name: str) -> str:
        """The kind of `name` without touching its data. Raises: BadModelFile as `get`."""
        ...

    def close(self) -> None:
        """Drop the maps; arrays handed out keep theirs alive."""
        ...


def map_file(path: Path) -> mmap.mmap:
    """Map `path` copy-on-write (torch refuses read-only arrays; the file is never written). Raises: BadModelFile if it is empty or unreadable."""
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise BadModelFile(f"{path.name}: cannot be read ({error}); expected a model file.") from error


def block_layout(kind: str) -> tuple[int, int]:
    """(values a block, bytes a block) of a GGUF type name in lower case."""
    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return int(block_len), int(block_bytes)


def check_disjoint(label: str, spans: Iterable[tuple[int, int, str]]) -> None:
    """Check that no two of the tensors (first byte, byte after the last, name) share bytes. Raises: BadModelFile naming both."""
    end, last = 0, ""
    for begin, stop, name in sorted(spans):
        if begin < end:
            raise BadModelFile(f"{label}: tensors {last} and {name} overlap; the file is damaged.")
        end, last = max(end, stop), name


def view_tensor(buffer: mmap.mmap, offset: int, kind: str, shape: tuple[int, ...]) -> RawTensor:
    """A tensor over `buffer` at byte `offset`. The caller has checked that it lies inside."""
    count = int(np.prod(shape, dtype=np.int64))
    dtype = PLAIN_DTYPES.get(kind)
    if dtype is not None:
        return RawTensor(kind, shape, np.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(shape))
    block_len, block_bytes = block_layout(kind)
    row_bytes = shape[-1] // block_len * block_bytes
    rows = count // shape[-1]
    return RawTensor(kind, shape, np.frombuffer(buffer, dtype=np.uint8, count=rows * row_bytes, offset=offset).reshape(rows, row_bytes))


def dequantize(raw: RawTensor) -> npt.NDArray[np.float32]:
    """`raw` as a fresh float32 array of `raw.shape`. Raises: BadModelFile for a block type that the gguf library cannot decode."""
    if raw.kind == "bf16":
        return (raw.data.astype(np.uint32) << 16).view(np.float32)
    if raw.kind in PLAIN_DTYPES:
        return raw.data.astype(np.float32)
    try:
        values = _dequantize_blocks(raw.data, GGMLQuantizationType[raw.kind.upper()])
    except NotImplementedError as error:
        raise BadModelFile(f"Weights of type {raw.kind} cannot be decoded; convert the model to Q8_0, Q4_K_M or F16.") from error
    return np.asarray(values, dtype=np.float32).reshape(raw.shape)
