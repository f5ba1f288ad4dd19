"""The door to weights: `open_weights` for whatever `path` is, `check_tensors` for what a model needs. No torch, nothing copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rootlet.core.errors import BadModelFile
from rootlet.core.log import logger
from rootlet.formats.gguf import is_gguf
from rootlet.formats.gguf_split import gguf_files
from rootlet.formats.gguf_weights import GGUFWeights
from rootlet.formats.safetensors import SafetensorsWeights
from rootlet.formats.tensor import RawTensor, WeightFile, dequantize

__all__ = ["RawTensor", "WeightFile", "check_tensors", "dequantize", "is_gguf_model", "open_weights", "require_model"]

_log = logger("formats")


def is_gguf_model(path: Path) -> bool:
    """Whether `path` means a GGUF model (else safetensors). Raises: BadModelFile if it does not exist or holds both, or several."""
    if not path.exists():
        raise BadModelFile(f"{path}: no such file or folder.")
    if path.is_file():
        return is_gguf(path)
    found = gguf_files(path)
    if found and any(path.glob("*.safetensors")):
        raise BadModelFile(f"{path.name}: the folder holds a GGUF model ({found[0].name}) and safetensors; give the GGUF file, or move it away.")
    return bool(found)


def require_model(path: Path) -> None:
    """Check from names and first bytes that `path` can be a model at all. Raises: BadModelFile saying what it is not and what is expected."""
    if is_gguf_model(path):
        return
    expected = "expected a GGUF file, or a folder of safetensors with its config.json and tokenizer.json"
    if path.is_file() and path.suffix != ".safetensors":
        raise BadModelFile(f"{path}: neither a GGUF nor a safetensors file; {expected}.")
    if not (path if path.is_dir() else path.parent).joinpath("config.json").is_file():
        where = "in this folder, and no GGUF file" if path.is_dir() else "beside this file"
        raise BadModelFile(f"{path}: no config.json {where}; {expected}.")


def open_weights(path: Path) -> WeightFile:
    """Map the model at `path`: GGUF file, any piece of a split, safetensors file, or a folder with one model.

    Raises: BadModelFile naming the file, the tensor and what was expected (missing, mixed or truncated pieces, unknown types, two models).
    """
    if is_gguf_model(path):
        weights = GGUFWeights(path)
        if weights.unknown:
            _log.warning("unknown_tensors", file=weights.label, count=len(weights.unknown), names=",".join(weights.unknown[:5]))
        return weights
    if path.is_file() and path.suffix != ".safetensors":
        raise BadModelFile(f"{path.name}: neither a GGUF nor a safetensors file.")
    return SafetensorsWeights(path)


def check_tensors(weights: WeightFile, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that `weights` holds every tensor of `expected` with its shape. Extra ones are logged once.

    Raises: BadModelFile naming the first tensors that are missing or have another shape.
    """
    present = set(weights.names())
    missing = [name for name in expected if name not in present]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadModelFile(
            f"{weights.label}: missing tensors: {', '.join(missing[:3])}{more}; the model needs {len(expected)} tensors, the file has {len(present)}."
        )
    for name, shape in expected.items():
        if weights.shape(name) != shape:
            raise BadModelFile(f"{weights.label}: tensor {name} has shape {list(weights.shape(name))}, expected {list(shape)}.")
    extra = [name for name in present if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if extra:
        _log.warning("unused_tensors", file=weights.label, count=len(extra), first=sorted(extra)[0])
