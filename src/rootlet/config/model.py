"""`ModelConfig`: what the compute wing must know of a model, whatever file it came from. Integers and floats; no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`kind`: default | linear | llama3 | yarn. `factors` (GGUF rope_freqs / longrope) divide the base frequencies one by one.
    `interleaved`: pairs (2i, 2i+1) instead of halves (i, i + d/2). `rotary_dim` <= head_dim."""

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    interleaved: bool = False
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. `arch` = registry name of the model file ("llama" covers Llama, Mistral, Qwen2, Qwen3, SmolLM2/3).

    `nope_layers[i]` True = layer i has no rope (SmolLM3). `sliding_window[i]` = keys visible including the query's own, None = all.
    `eos_token_ids` = every id that ends a generation (generation_config, tokenizer eos, GGUF eot/eom). `quant` = GGUF mix or dtype, for people.
    """

    arch: str
    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_len: int
    rms_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    nope_layers: tuple[bool, ...] = ()
    sliding_window: tuple[int | None, ...] = ()
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quant: str = ""
    name: str = ""
