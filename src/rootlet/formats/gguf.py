"""Reads one GGUF file: metadata and tensor table, memory-mapped, nothing decoded before it is asked for.

Owns the byte layout (versions 2 and 3, little endian). Does not know what the keys mean, nor split files (`formats.gguf_split`).
Our own reader because the library's needs seconds for a large vocabulary (docs/decisions/0002-gguf-reader.md); types, block sizes and
decoding stay the library's. Source: the GGUF specification.

    magic | version | number of tensors, keys | keys and values | tensor table | padding | data
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGMLQuantizationType

from rootlet.core.errors import BadModelFile
from rootlet.formats.tensor import RawTensor, block_layout, check_disjoint, map_file, view_tensor

_SCALARS: dict[int, str] = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """`shape` in numpy order (rows first); `offset` from the start of the file; `size_bytes` of the data."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _LazyArray:
    item_type: int
    count: int
    offset: int


class GGUFFile:
    """One mapped GGUF file. `tensors` by GGUF name; values through `value`, `strings` and `numbers`."""

    def __init__(self, path: Path) -> None:
        """Map and parse `path`. Raises: BadModelFile naming the file and what is wrong with it. Cost: about 0.1 us a vocabulary entry."""
        self.path = path
        self._buffer = map_file(path)
        self._fields: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensorInfo] = {}
        try:
            self._parse()
        except (struct.error, OverflowError) as error:  # a length beyond the file, or beyond any file
            raise BadModelFile(f"{path.name}: the file ends inside its header ({len(self._buffer)} bytes); it is truncated.") from error
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{path.name}: a key or tensor name is not UTF-8; the file is damaged.") from error

    def keys(self) -> list[str]:
        """All metadata keys in file order."""
        return list(self._fields)

    def value(self, key: str, default: Any = None) -> Any:
        """A scalar or string; an array as a list; `default` if the key is absent."""
        found = self._fields.get(key, default)
        if not isinstance(found, _LazyArray):
            return found
        return self.strings(key) if found.item_type == _STRING else self.numbers(key).tolist()

    def strings(self, key: str) -> list[str]:
        """An array of strings, decoded now (bytes that are not UTF-8 become replacement characters); [] if absent."""
        lazy = self._fields.get(key)
        if lazy is None:
            return []
        if not isinstance(lazy, _LazyArray) or lazy.item_type != _STRING:
            self._fail(f"key {key} should be an array of strings")
        buffer, unpack, offset, out = self._buffer, _U64.unpack_from, lazy.offset, []
        for _ in range(lazy.count):
            start = offset + 8
            offset = start + unpack(buffer, offset)[0]
            out.append(buffer[start:offset].decode("utf-8", "replace"))
        return out

    def numbers(self, key: str) -> np.ndarray[Any, np.dtype[Any]]:
        """An array of numbers as a numpy view of the file; empty if absent."""
        lazy = self._fields.get(key)
        if lazy is None:
            return np.empty(0, dtype=np.int32)
        if not isinstance(lazy, _LazyArray) or lazy.item_type not in _SCALARS:
            self._fail(f"key {key} should be an array of numbers")
        return np.frombuffer(self._buffer, dtype=np.dtype(_SCALARS[lazy.item_type]), count=lazy.count, offset=lazy.offset)

    def get(self, name: str) -> RawTensor:
        """The tensor with the GGUF name `name`. Raises: KeyError."""
        info = self.tensors[name]
        return view_tensor(self._buffer, info.offset, info.kind, info.shape)

    def _fail(self, what: str) -> NoReturn:
        raise BadModelFile(f"{self.path.name}: {what}.")

    def _parse(self) -> None:
        head = self._buffer[:4]
        if head != b"GGUF":
            self._fail(f"not a GGUF file (it starts with {head!r}, expected b'GGUF')")
        (version,) = _U32.unpack_from(self._buffer, 4)
        if version & 0xFFFF == 0:
            self._fail("a big-endian GGUF file; only little-endian ones are read (gguf-convert-endian converts)")
        if version not in (2, 3):
            self._fail(f"GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_fields = struct.unpack_from("<QQ", self._buffer, 8)
        if max(num_tensors, num_fields) * 12 > len(self._buffer):
            self._fail(f"claims {num_tensors} tensors and {num_fields} keys, more than its {len(self._buffer)} bytes can hold")
        offset = 24
        for _ in range(num_fields):
            offset = self._read_field(offset)
        table: list[tuple[str, str, tuple[int, ...], int]] = []
        for _ in range(num_tensors):
            offset = self._read_tensor_info(offset, table)
        self._place_tensors(offset, table)

    def _read_text(self, offset: int) -> tuple[str, int]:
        start = offset + 8
        end = start + _U64.unpack_from(self._buffer, offset)[0]
        if end > len(self._buffer):
            self._fail("a string runs past the end of the file; it is truncated or damaged")
        return self._buffer[start:end].decode("utf-8"), end

    def _read_field(self, offset: int) -> int:
        key, offset = self._read_text(offset)
        (kind,) = _U32.unpack_from(self._buffer, offset)
        offset += 4
        if key in self._fields:
            self._fail(f"key {key} occurs twice")
        if kind == _STRING:
            start = offset + 8
            end = start + _U64.unpack_from(self._buffer, offset)[0]
            if end > len(self._buffer):
                self._fail(f"the value of key {key} runs past the end of the file; it is truncated or damaged")
            self._fields[key] = self._buffer[start:end].decode("utf-8", "replace")
            return int(end)
        if kind == _ARRAY:
            return self._skip_array(key, offset)
        if kind not in _SCALARS:
            self._fail(f"key {key} has the unknown type {kind}")
        scalar = struct.Struct(_SCALARS[kind])
        (self._fields[key],) = scalar.unpack_from(self._buffer, offset)
        return int(offset + scalar.size)

    def _skip_array(self, key: str, offset: int) -> int:
        item_type, count = struct.unpack_from("<IQ", self._buffer, offset)
        offset += 12
        self._fields[key] = _LazyArray(item_type, count, offset)
        if item_type == _STRING:
            buffer, unpack = self._buffer, _U64.unpack_from
            end = offset
            for _ in range(count):
                end += 8 + unpack(buffer, end)[0]
            if end > len(buffer):
                self._fail(f"the array of key {key} runs past the end of the file; it is truncated or damaged")
            return int(end)
        if item_type not in _SCALARS:
            self._fail(f"key {key} is an array of the type {item_type}, which is not read")
        end = int(offset + count * struct.calcsize(_SCALARS[item_type]))
        if end > len(self._buffer):
            self._fail(f"the array of key {key} runs past the end of the file; it is truncated or damaged")
        return end

    def _read_tensor_info(self, offset: int, table: list[tuple[str, str, tuple[int, ...], int]]) -> int:
        name, offset = self._read_text(offset)
        (num_dims,) = _U32.unpack_from(self._buffer, offset)
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(f"tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
        dims = struct.unpack_from(f"<{num_dims}Q", self._buffer, offset + 4)
        offset += 4 + 8 * num_dims
        raw_kind, start = struct.unpack_from("<IQ", self._buffer, offset)
        try:
            kind = GGMLQuantizationType(raw_kind).name.lower()
        except ValueError:
            self._fail(f"tensor {name} has the unknown type {raw_kind}; a newer gguf package may know it")
        table.append((name, kind, tuple(reversed(dims)), start))
        return offset + 12

    def _place_tensors(self, offset: int, table: list[tuple[str, str, tuple[int, ...], int]]) -> None:
        alignment = self._fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment}; expected a power of two")
        base = -(-offset // alignment) * alignment
        for name, kind, shape, start in table:
            block_len, block_bytes = block_layout(kind)
            if min(shape) < 1 or shape[-1] % block_len:
                self._fail(f"tensor {name} of type {kind} has shape {list(shape)}; rows must be multiples of {block_len}")
            size_bytes = int(np.prod(shape, dtype=object)) // block_len * block_bytes
            end = base + start + size_bytes
            if start % alignment:
                self._fail(f"tensor {name} starts at {start}, which is no multiple of the alignment {alignment}")
            if end > len(self._buffer):
                self._fail(f"truncated: tensor {name} should end at byte {end}, but the file has {len(self._buffer)} bytes")
            if name in self.tensors:
                self._fail(f"tensor {name} occurs twice")
            self.tensors[name] = GGUFTensorInfo(name, kind, shape, base + start, size_bytes)
        check_disjoint(self.path.name, ((t.offset, t.offset + t.size_bytes, t.name) for t in self.tensors.values()))


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that starts like a GGUF file or is named like one."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as handle:
        return handle.read(4) == b"GGUF"
