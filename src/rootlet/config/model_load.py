"""Model files -> `ModelConfig` and sampling defaults, for GGUF and Hugging Face folders alike. Reads headers only; no torch.

Refuses a file that lacks a tensor or has one of another shape, so that nothing is ever served with unset weights.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, cast

import msgspec

from rootlet.config.model import ModelConfig, RopeConfig
from rootlet.config.model_load_gguf import config_from_gguf
from rootlet.config.model_load_hf import config_from_hf
from rootlet.config.model_tensors import expected_tensors
from rootlet.core.errors import BadModelFile, InvalidValue
from rootlet.core.sampling_params import SamplingParams, validate
from rootlet.formats.gguf_split import open_pieces
from rootlet.formats.hf import read_optional_json
from rootlet.formats.weights import check_tensors, is_gguf_model, open_weights, require_model

_log = logging.getLogger(__name__)

MAX_POSITIONS = 2**31 - 1
MAX_TURNS = 1e6
MAX_HEAD_DIM = 512
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
    return path if path.is_dir() else path.absolute().parent


def load_model_config(path: Path) -> ModelConfig:
    """Describe the model at `path` (GGUF file, piece or folder; safetensors folder or file) and check its tensor table.

    Raises: BadModelFile naming file, key or tensor, what was expected and what is served. Cost: headers only (10 ms at 49k tokens).
    """
    require_model(path)
    try:
        config = config_from_gguf(path) if is_gguf_model(path) else config_from_hf(model_folder(path))
    except (TypeError, ValueError, OverflowError, ArithmeticError) as error:  # a text where a number belongs, a list, an infinity
        raise BadModelFile(f"{path.name}: a value of the model's description has the wrong type or size ({error}).") from error
    _check_sizes(config, path.name)
    weights = open_weights(path)
    check_tensors(weights, expected_tensors(config))
    weights.close()
    return config


def _check_sizes(config: ModelConfig, label: str) -> None:
    """What no tensor's shape contradicts, but what would take memory or divide by zero. Raises: BadModelFile."""
    rope = config.rope
    checks = {
        f"context length {config.max_context_len}": 1 <= config.max_context_len <= MAX_POSITIONS,
        f"head size {config.head_dim}": 1 <= config.head_dim <= MAX_HEAD_DIM,
        f"{rope.rotary_dim} rotary dimensions of a head of {config.head_dim}": 2 <= rope.rotary_dim <= config.head_dim and rope.rotary_dim % 2 == 0,
        f"{config.num_heads} heads over {config.num_kv_heads} KV heads": config.num_kv_heads >= 1 and config.num_heads % config.num_kv_heads == 0,
        f"rope base {rope.theta}": math.isfinite(rope.theta) and rope.theta > 0.0,
        f"rope factor {rope.factor}": math.isfinite(rope.factor) and rope.factor > 0.0,
        f"rope of kind {rope.kind} over {rope.original_max_len} positions": _rope_holds(rope),
        "rope factors": all(math.isfinite(x) and x > 0.0 for x in rope.factors),
        f"norm epsilon {config.rms_eps}": math.isfinite(config.rms_eps) and config.rms_eps >= 0.0,
        "end token ids": all(0 <= token_id < 2**31 for token_id in config.eos_token_ids),
    }
    for what, holds in checks.items():
        if not holds:
            raise BadModelFile(f"{label}: {what} cannot be; the file is damaged or not a model of this kind.")


def _rope_holds(rope: RopeConfig) -> bool:
    """Whether the formulas of llama3 and yarn have no division by zero, no logarithm of nothing, and a finite end."""
    if rope.kind == "llama3":
        finite = math.isfinite(rope.low_freq_factor) and math.isfinite(rope.high_freq_factor)
        return 0 < rope.original_max_len <= MAX_POSITIONS and finite and rope.high_freq_factor != rope.low_freq_factor
    if rope.kind == "yarn":
        turns = all(1.0 / MAX_TURNS <= beta <= MAX_TURNS for beta in (rope.beta_fast, rope.beta_slow))
        return 0 < rope.original_max_len <= MAX_POSITIONS and rope.theta > 1.0 and turns and math.isfinite(rope.attention_factor or 1.0)
    return True


def load_sampling_defaults(path: Path) -> dict[str, float | int]:
    """The sampling parameters that the model's makers advise, by our field names; {} if the files name none. What no request may ask for is left
    out and logged."""
    if is_gguf_model(path):
        file = open_pieces(path)[0]
        found: dict[str, Any] = {ours: file.value(key) for key, ours in _GGUF_SAMPLING.items()}
    else:
        generation = read_optional_json(model_folder(path), "generation_config.json")
        found = {key: generation.get(key) for key in _HF_SAMPLING}
        if generation.get("do_sample") is False:
            found = {**found, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
    return {key: value for key, advice in found.items() if (value := _allowed(key, advice)) is not None}


def _allowed(key: str, advice: Any) -> float | int | None:
    if not isinstance(advice, int | float) or isinstance(advice, bool):
        return None
    try:
        params = msgspec.convert({key: advice}, SamplingParams)
        validate(params, MAX_POSITIONS, max_n=1)
    except (InvalidValue, msgspec.ValidationError) as error:
        _log.warning("sampling_default_ignored key=%s value=%r reason=%s", key, advice, error)
        return None
    return cast("float | int", getattr(params, key))
