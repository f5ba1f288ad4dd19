"""Safetensors checkpoints as a `WeightFile`: one file, shards under an index, or shards without one.

Owns which files make up the model: the index wins; without an index, shards must not collide. Reads headers itself because the
library cannot give bf16 to numpy. Does not know which tensors a model needs (`formats.weights.check_tensors`).

    u64 length of header | header (JSON: name -> dtype, shape, data_offsets) | data
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rootlet.core.errors import BadModelFile
from rootlet.formats.hf import read_json
from rootlet.formats.tensor import PLAIN_DTYPES, RawTensor, check_disjoint, map_file, view_tensor

_KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F64": "f64", "I8": "i8", "I16": "i16", "I32": "i32", "I64": "i64"}
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    offset: int
    end: int


class _Shard:
    """One mapped file and its table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer: mmap.mmap = map_file(path)
        self.entries = _read_table(path, self.buffer)


def _read_table(path: Path, buffer: mmap.mmap) -> dict[str, _Entry]:
    try:
        (header_len,) = struct.unpack_from("<Q", buffer, 0)
        if header_len > min(_MAX_HEADER_BYTES, len(buffer) - 8):
            raise BadModelFile(f"{path.name}: truncated or not a safetensors file (header of {header_len} bytes in a file of {len(buffer)}).")
        header = json.loads(buffer[8 : 8 + header_len], object_pairs_hook=_unique)
        base = 8 + header_len
        entries = {name: _entry(path, name, spec, base, len(buffer)) for name, spec in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadModelFile(f"{path.name}: its safetensors header cannot be read ({error}); the file is damaged.") from error
    check_disjoint(path.name, ((entry.offset, entry.end, name) for name, entry in entries.items()))
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; left alone, the last of two equal names would win."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(path: Path, name: str, spec: dict[str, Any], base: int, file_bytes: int) -> _Entry:
    shape = tuple(int(x) for x in spec["shape"])
    begin, end = (int(x) for x in spec["data_offsets"])
    if base + end > file_bytes:
        raise BadModelFile(f"{path.name}: truncated: tensor {name} should end at byte {base + end}, but the file has {file_bytes} bytes.")
    kind = _KINDS.get(spec["dtype"])
    if kind is not None:
        expected = int(np.prod(shape, dtype=object)) * np.dtype(PLAIN_DTYPES[kind]).itemsize
        if not 0 <= begin <= end or end - begin != expected:
            raise BadModelFile(f"{path.name}: tensor {name} has {end - begin} bytes, expected {expected} for {spec['dtype']} {list(shape)}.")
    return _Entry(spec["dtype"], shape, base + begin, base + end)


class SafetensorsWeights:
    """All shards of one checkpoint. A checkpoint of the bare decoder (no "model." prefix) gets the prefix."""

    def __init__(self, path: Path) -> None:
        """Open the model that `path` (file or folder) means. Raises: BadModelFile naming the shard or tensor."""
        self.label = path.name
        self._where = _locate(path)
        if "model.embed_tokens.weight" not in self._where and "embed_tokens.weight" in self._where:
            self._where = {name if name == "lm_head.weight" else f"model.{name}": place for name, place in self._where.items()}

    def names(self) -> list[str]:
        """All names that the checkpoint holds."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of `name`. Raises: BadModelFile."""
        return self._find(name)[1].shape

    def kind(self, name: str) -> str:
        """The dtype of `name` in our words. Raises: BadModelFile if there is none such or it is not served."""
        shard, entry = self._find(name)
        kind = _KINDS.get(entry.dtype)
        if kind is None:
            raise BadModelFile(f"{shard.path.name}: tensor {name} has dtype {entry.dtype}; served are {', '.join(_KINDS)}.")
        return kind

    def get(self, name: str) -> RawTensor:
        """The tensor `name`, mapped. Raises: BadModelFile."""
        kind = self.kind(name)
        shard, entry = self._find(name)
        return view_tensor(shard.buffer, entry.offset, kind, entry.shape)

    def close(self) -> None:
        """Drop the maps; arrays handed out keep theirs alive."""
        self._where.clear()

    def _find(self, name: str) -> tuple[_Shard, _Entry]:
        found = self._where.get(name)
        if found is None:
            raise BadModelFile(f"{self.label}: tensor {name} is missing.")
        return found


def _locate(path: Path) -> dict[str, tuple[_Shard, _Entry]]:
    if path.is_file():
        return _merge([_Shard(path)])
    index = path / _INDEX
    if index.is_file():
        return _locate_by_index(path, read_json(index))
    return _merge([_Shard(p) for p in shards_without_index(path)])


def _locate_by_index(folder: Path, index: dict[str, Any]) -> dict[str, tuple[_Shard, _Entry]]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise BadModelFile(f"{_INDEX}: no usable weight_map; expected tensor names and the shards that hold them.")
    shards: dict[str, _Shard] = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise BadModelFile(f"{_INDEX}: shard {file_name!r} is not a plain file name.")
        if not (folder / file_name).is_file():
            raise BadModelFile(f"{folder.name}: shard {file_name}, named in {_INDEX}, is missing.")
        shards[file_name] = _Shard(folder / file_name)
    where = {}
    for name, file_name in weight_map.items():
        shard = shards[file_name]
        if name not in shard.entries:
            raise BadModelFile(f"{file_name}: tensor {name}, which {_INDEX} places in this shard, is missing.")
        where[name] = (shard, shard.entries[name])
    return where


def _merge(shards: list[_Shard]) -> dict[str, tuple[_Shard, _Entry]]:
    where: dict[str, tuple[_Shard, _Entry]] = {}
    for shard in shards:
        for name, entry in shard.entries.items():
            if name in where:
                raise BadModelFile(f"{shard.path.name}: tensor {name} is also in {where[name][0].path.name}, and there is no {_INDEX} to choose.")
            where[name] = (shard, entry)
    return where


def shards_without_index(folder: Path) -> list[Path]:
    """The weight files of a folder without an index. Raises: BadModelFile for none, a missing shard, or shards of two models."""
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("adapter_"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        hint = " Pickled weights (*.bin, *.pth) can run code and are not loaded; convert them to safetensors." if pickled else ""
        raise BadModelFile(f"{folder.name}: no *.safetensors and no *.gguf file found.{hint}")
    groups: dict[tuple[str, int], set[int]] = {}
    loose = []
    for file in files:
        match = _SHARD.match(file.name)
        if match is None:
            loose.append(file.name)
        else:
            groups.setdefault((match["stem"], int(match["count"])), set()).add(int(match["index"]))
    if len(groups) > 1 or (groups and loose):
        found = ", ".join(p.name for p in files)
        raise BadModelFile(f"{folder.name}: weight files of several models and no {_INDEX} ({found}); keep one model a folder.")
    for (stem, count), indices in groups.items():
        missing = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, min(count, 9999) + 1) if i not in indices]
        if missing:
            raise BadModelFile(f"{folder.name}: missing shards: {', '.join(missing[:5])}.")
    return files
