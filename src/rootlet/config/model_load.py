"""Model files -> `ModelConfig` and sampling defaults, for GGUF and Hugging Face folders alike. Reads headers only; no torch.

Refuses a file that lacks a tensor or has one of another shape, so that nothing is ever served with unset weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rootlet.config.model import ModelConfig
from rootlet.config.model_load_gguf import config_from_gguf
from rootlet.config.model_load_hf import config_from_hf
from rootlet.config.model_tensors import expected_tensors
from rootlet.core.errors import BadModelFile
from rootlet.formats.gguf_split import open_pieces
from rootlet.formats.hf import read_optional_json
from rootlet.formats.weights import check_tensors, is_gguf_model, open_weights

_HF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def model_folder(path: Path) -> Path:
    """The folder whose JSON files describe the safetensors model at `path` (a folder, or one of its weight files)."""
    return path if path.is_dir() else path.parent


def load_model_config(path: Path) -> ModelConfig:
    """Describe the model at `path` (GGUF file, piece or folder; safetensors folder or file) and check its tensor table.

    Raises: BadModelFile naming file, key or tensor, what was expected and what is served. Cost: headers only (10 ms at 49k tokens).
    """
    if is_gguf_model(path):
        config = config_from_gguf(path)
    else:
        if not (model_folder(path) / "config.json").is_file():
            raise BadModelFile(f"{path.name}: no config.json beside the weights; expected a Hugging Face model folder or a GGUF file.")
        config = config_from_hf(model_folder(path))
    weights = open_weights(path)
    check_tensors(weights, expected_tensors(config))
    weights.close()
    return config


def load_sampling_defaults(path: Path) -> dict[str, float | int]:
    """The sampling parameters that the model's makers advise, by our field names; {} if the files name none."""
    if is_gguf_model(path):
        file = open_pieces(path)[0]
        found: dict[str, Any] = {ours: file.value(key) for key, ours in _GGUF_SAMPLING.items()}
    else:
        generation = read_optional_json(model_folder(path), "generation_config.json")
        found = {key: generation.get(key) for key in _HF_SAMPLING}
        if generation.get("do_sample") is False:
            found = {**found, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
    return {key: value for key, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)}
