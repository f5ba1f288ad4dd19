"""Which tensors a `ModelConfig` needs, by Hugging Face name and shape. Used to refuse an incomplete file before anything is loaded."""

from __future__ import annotations

from rootlet.config.model import ModelConfig


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a model of `config.arch` "llama" reads. A tied head is not among them."""
    hidden, q_dim, kv_dim = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        out["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (q_dim, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_dim, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_dim, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_dim, config.output_bias),
        "mlp.gate_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.up_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, config.intermediate_size, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        out[prefix + "input_layernorm.weight"] = (hidden,)
        out[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            out[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            out[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (rows, cols, bias) in projections.items():
            out[f"{prefix}{name}.weight"] = (rows, cols)
            if bias:
                out[f"{prefix}{name}.bias"] = (rows,)
    return out
