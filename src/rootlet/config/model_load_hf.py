"""config.json (+ generation_config, tokenizer_config) of a Hugging Face folder -> `ModelConfig`. No code of the folder is ever run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootlet.config.model import ModelConfig
from rootlet.config.rope_load import rope_from_hf
from rootlet.core.errors import BadModelFile
from rootlet.core.log import logger
from rootlet.formats.hf import added_token_ids, read_json, read_optional_json, token_text

_log = logger("config")

MAX_LAYERS = 4096
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Arithmetic that other families have, and the value at which it does nothing.
_ONLY_AT = {
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "qk_layernorm": False,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "use_qk_norm": False,
}
_DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class _Family:
    """What config.json may leave out: the defaults of the family's config class."""

    max_len: int
    theta: float = 10000.0
    rms_eps: float = 1e-6
    kv_heads: int | None = None
    head_dim: int | None = None
    tie: bool = False
    qk_norm: bool = False
    window: Callable[[dict[str, Any], int], list[int | None]] | None = None


def _window_everywhere(config: dict[str, Any], num_layers: int) -> list[int | None]:
    return [config.get("sliding_window", 4096)] * num_layers


def _window_from_layer(config: dict[str, Any], num_layers: int) -> list[int | None]:
    """Qwen: from `max_window_layers` on, unless `layer_types` says otherwise."""
    first = config.get("max_window_layers", 28)
    return _window_by_flag(config, [layer >= first for layer in range(num_layers)], default=4096)


def _window_without_rope(config: dict[str, Any], num_layers: int) -> list[int | None]:
    """SmolLM3: in the layers without rope, unless `layer_types` says otherwise."""
    return _window_by_flag(config, _nope_layers(config, num_layers), default=None)


def _window_by_flag(config: dict[str, Any], slides: Sequence[bool], *, default: int | None) -> list[int | None]:
    """Off unless `use_sliding_window`."""
    window = config.get("sliding_window", default) if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    return [window if slide else None for slide in ([kind == "sliding_attention" for kind in types] if types else slides)]


HF_FAMILIES: dict[str, _Family] = {
    "llama": _Family(2048),
    "mistral": _Family(131072, kv_heads=8, window=_window_everywhere),
    "qwen2": _Family(32768, kv_heads=32, window=_window_from_layer),
    "qwen3": _Family(32768, kv_heads=32, head_dim=128, qk_norm=True, window=_window_from_layer),
    "smollm3": _Family(32768, theta=2_000_000.0, kv_heads=4, tie=True, window=_window_without_rope),
}


def config_from_hf(folder: Path) -> ModelConfig:
    """Read the folder's config. Raises: BadModelFile naming the key, the value and what is served."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    family = HF_FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not isinstance(kind, str):
        remote = " It asks for Python code of its own (auto_map), which is never run." if config.get("auto_map") else ""
        raise BadModelFile(f"{folder.name}: config.json: model_type {kind!r} is not served; served are {', '.join(HF_FAMILIES)}.{remote}")
    if config.get("auto_map"):
        _log.warning("auto_map_ignored", model=folder.name, reason=f"code from model folders is never run; the built-in {kind} is used")
    _refuse_unserved(config)
    num_layers, num_heads, hidden = (_need(config, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if num_layers > MAX_LAYERS:
        raise BadModelFile(f"config.json: num_hidden_layers is {num_layers}; at most {MAX_LAYERS} are read.")
    head_dim = int(config.get("head_dim") or family.head_dim or hidden // num_heads)
    max_len = int(config.get("max_position_embeddings", family.max_len))
    biased = bool(config.get("attention_bias", False))
    kv_heads = config.get("num_key_value_heads")
    generation = read_optional_json(folder, "generation_config.json")
    bos = config.get("bos_token_id", generation.get("bos_token_id"))
    return ModelConfig(
        arch="llama",
        family=kind,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_need(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=int(kv_heads if kv_heads is not None else min(family.kv_heads or num_heads, num_heads)),
        head_dim=head_dim,
        vocab_size=_need(config, "vocab_size"),
        max_context_len=max_len,
        rms_eps=float(config.get("rms_norm_eps", family.rms_eps)),
        rope=rope_from_hf(config, head_dim=head_dim, max_len=max_len, theta=family.theta),
        tie_embeddings=bool(config.get("tie_word_embeddings", family.tie)),
        attention_bias=True if kind == "qwen2" else biased,
        output_bias=False if kind == "qwen2" else biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        nope_layers=_nope_layers(config, num_layers) if kind == "smollm3" else (),
        sliding_window=_windows(config, family, num_layers, max_len),
        dtype=_dtype(config),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_eos_ids(folder, config, generation),
        quant=_dtype(config),
        name=folder.resolve().name,
    )


def _need(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadModelFile(f"config.json: {key} is {value!r}; expected a positive whole number.")
    return value


def _refuse_unserved(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else "?"
        raise BadModelFile(f"config.json: weights quantised with {method!r} are not served; use the unquantised model, or a GGUF file of it.")
    if config.get("num_local_experts") or config.get("num_experts"):
        raise BadModelFile("config.json: mixture-of-experts models are not served yet.")
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise BadModelFile(f"config.json: hidden_act {act!r} is not served; served is silu.")
    for key, neutral in _ONLY_AT.items():
        if config.get(key) not in (None, neutral):
            raise BadModelFile(f"config.json: {key} {config[key]!r} is not served; the models of this family have none.")
    for kind in config.get("layer_types") or ():
        if kind not in _LAYER_TYPES:
            raise BadModelFile(f"config.json: layer_types holds {kind!r}; served are {', '.join(_LAYER_TYPES)}.")


def _nope_layers(config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    flags = config.get("no_rope_layers")
    if not flags:
        interval = int(config.get("no_rope_layer_interval", 4))
        flags = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(flags) != num_layers:
        raise BadModelFile(f"config.json: no_rope_layers has {len(flags)} entries, expected {num_layers}.")
    return tuple(not flag for flag in flags)


def _windows(config: dict[str, Any], family: _Family, num_layers: int, max_len: int) -> tuple[int | None, ...]:
    """Windows by layer; () if none can ever hide a key."""
    windows = family.window(config, num_layers) if family.window else []
    if len(windows) not in (0, num_layers):
        raise BadModelFile(f"config.json: layer_types has {len(windows)} entries, expected {num_layers}.")
    if any(w is not None and (not isinstance(w, int) or w < 1) for w in windows):
        raise BadModelFile(f"config.json: sliding_window is {config.get('sliding_window')!r}; expected a positive whole number, or null.")
    kept = tuple(w if w is not None and w < max_len else None for w in windows)
    return kept if any(w is not None for w in kept) else ()


def _dtype(config: dict[str, Any]) -> str:
    stated = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = _DTYPES.get(str(stated).removeprefix("torch."))
    if name is None:
        raise BadModelFile(f"config.json: dtype {stated!r} is not served; served are float32, float16, bfloat16.")
    return name


def _eos_ids(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """generation_config's list, then config's, then the tokenizer's eos; in that order, each once."""
    found: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    eos_text = token_text(read_optional_json(folder, "tokenizer_config.json").get("eos_token"))
    if eos_text is not None:
        token_id = added_token_ids(folder).get(eos_text)
        found += [] if token_id is None else [token_id]
    return tuple(dict.fromkeys(int(x) for x in found))
