"""GGUF metadata -> `ModelConfig`. Biases, q/k norms and the tied head are read off the tensor table, not guessed from the name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import LlamaFileType

from rootlet.config.model import ModelConfig, RopeConfig
from rootlet.core.errors import BadModelFile
from rootlet.formats.gguf import GGUFFile
from rootlet.formats.gguf_weights import GGUFWeights

# Architecture -> whether its converter interleaves the rows of q and k, so that rope pairs are (2i, 2i+1).
GGUF_ARCHS: dict[str, bool] = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": True}

# Keys of other architectures, and the value at which they ask for nothing.
_ONLY_AT = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.sliding_window_pattern": None,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "use_parallel_residual": False,
}

# Texts that end a turn or a document in the families we serve; only control tokens with these texts count.
_END_TEXTS = frozenset(("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>"))
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL = 3
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


class _Keys:
    """Metadata under the architecture's prefix, with errors that name key and file."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self._file = file
        self._arch = arch

    def find(self, key: str, default: Any = None) -> Any:
        return self._file.value(f"{self._arch}.{key}", default)

    def need(self, key: str) -> int:
        """A positive number; an array (a value a layer) must be constant."""
        value = self.find(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise BadModelFile(f"{self._file.path.name}: {self._arch}.{key} differs by layer ({value[:4]}...), which is not served.")
            value = value[0]
        if not isinstance(value, int) or value < 1:
            raise BadModelFile(f"{self._file.path.name}: {self._arch}.{key} is {value!r}; expected a positive whole number.")
        return value

    def refuse_unserved(self) -> None:
        """Raises `BadModelFile` for arithmetic that the file asks for and no model of ours does."""
        for key, neutral in _ONLY_AT.items():
            if (value := self.find(key, neutral)) != neutral:
                raise BadModelFile(f"{self._file.path.name}: {self._arch}.{key} {value!r} is not served.")


def config_from_gguf(path: Path) -> ModelConfig:
    """Read the metadata of the model that `path` means. Raises: BadModelFile naming file, key and what is served."""
    weights = GGUFWeights(path)
    file = weights.metadata
    arch = file.value("general.architecture")
    if arch not in GGUF_ARCHS:
        raise BadModelFile(f"{weights.label}: architecture {arch!r} is not served; served are {', '.join(GGUF_ARCHS)}.")
    keys = _Keys(file, arch)
    if keys.find("expert_count", 0):
        raise BadModelFile(f"{weights.label}: a mixture of {keys.find('expert_count')} experts; mixture-of-experts models are not served yet.")
    keys.refuse_unserved()
    num_layers, hidden, num_heads = keys.need("block_count"), keys.need("embedding_length"), keys.need("attention.head_count")
    head_dim = int(keys.find("attention.key_length") or hidden // num_heads)
    value_dim = keys.find("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise BadModelFile(f"{weights.label}: key_length {head_dim} and value_length {value_dim} differ, which is not served.")
    max_len = keys.need("context_length")
    names = set(weights.names())
    if num_layers > len(names):
        raise BadModelFile(f"{weights.label}: {arch}.block_count is {num_layers}, but the file has only {len(names)} tensors.")
    eps = keys.find("attention.layer_norm_rms_epsilon")
    if eps is None:
        raise BadModelFile(f"{weights.label}: {arch}.attention.layer_norm_rms_epsilon is missing.")
    window = keys.need("attention.sliding_window") if keys.find("attention.sliding_window") else max_len
    bos = file.value("tokenizer.ggml.bos_token_id")
    first = "model.layers.0."
    return ModelConfig(
        arch="llama",
        family=arch,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=keys.need("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=keys.need("attention.head_count_kv") if keys.find("attention.head_count_kv") is not None else num_heads,
        head_dim=head_dim,
        vocab_size=weights.shape("model.embed_tokens.weight")[0],
        max_context_len=max_len,
        rms_eps=float(eps),
        rope=_rope(weights, keys, head_dim=head_dim, interleaved=GGUF_ARCHS[arch]),
        tie_embeddings="lm_head.weight" not in names,
        attention_bias=first + "self_attn.q_proj.bias" in names,
        output_bias=first + "self_attn.o_proj.bias" in names,
        mlp_bias=first + "mlp.up_proj.bias" in names,
        qk_norm=first + "self_attn.q_norm.weight" in names,
        nope_layers=tuple((layer + 1) % 4 == 0 for layer in range(num_layers)) if arch == "smollm3" else (),
        sliding_window=(window,) * num_layers if window < max_len else (),
        dtype=_DTYPES.get(weights.kind(first + "self_attn.q_proj.weight"), "float32"),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_eos_ids(file),
        quant=_quant_name(weights),
        name=str(file.value("general.name") or weights.label.removesuffix(".gguf")),
    )


def _rope(weights: GGUFWeights, keys: _Keys, *, head_dim: int, interleaved: bool) -> RopeConfig:
    theta = float(keys.find("rope.freq_base", 10000.0))
    rotary_dim = int(keys.find("rope.dimension_count", head_dim))
    factors = weights.rope_factors()
    if factors and len(factors) != rotary_dim // 2:
        raise BadModelFile(f"{weights.label}: rope_freqs.weight has {len(factors)} values, expected {rotary_dim // 2}.")
    kind = keys.find("rope.scaling.type", "linear")
    factor = float(keys.find("rope.scaling.factor") or keys.find("rope.scale_linear") or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig("default", theta, rotary_dim, interleaved=interleaved, factors=factors)
    if kind == "linear":
        return RopeConfig("linear", theta, rotary_dim, factor=factor, interleaved=interleaved, factors=factors)
    if kind != "yarn":
        raise BadModelFile(f"{weights.label}: rope scaling {kind!r} is not served; served are none, linear, yarn.")
    return RopeConfig(
        "yarn",
        theta,
        rotary_dim,
        factor=factor,
        original_max_len=int(keys.find("rope.scaling.original_context_length") or keys.need("context_length")),
        attention_factor=(1.0 + 0.1 * float(np.log(max(factor, 1.0)))) * float(keys.find("rope.scaling.attn_factor", 1.0)),
        beta_fast=float(keys.find("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(keys.find("rope.scaling.yarn_beta_slow", 1.0)),
        interleaved=interleaved,
        factors=factors,
    )


def _eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """eos, eot, eom keys, then control tokens whose text ends a turn; in that order, each once."""
    found = [file.value(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    types = file.numbers("tokenizer.ggml.token_type")
    control = np.nonzero(types == _CONTROL)[0]
    tokens = file.strings("tokenizer.ggml.tokens") if control.size else []
    found += [int(i) for i in control if i < len(tokens) and tokens[i] in _END_TEXTS]
    return tuple(dict.fromkeys(int(x) for x in found if isinstance(x, int)))


def _quant_name(weights: GGUFWeights) -> str:
    file_type = weights.metadata.value("general.file_type")
    try:
        return str(LlamaFileType(file_type).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return weights.kind("model.layers.0.self_attn.q_proj.weight").upper()
