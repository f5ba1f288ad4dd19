"""The Llama family: Llama 2/3, Mistral, Qwen2, Qwen3, SmolLM2, SmolLM3, told apart by configuration only.

    x = x + o(attend(rope(norm_q(q(h))), rope(norm_k(k(h))), v(h))),  h = norm(x)          norm_q, norm_k: Qwen3
    x = x + down(silu(gate(h)) * up(h)),                              h = norm(x)

Biases on q, k, v (Qwen2), o and the MLP, layers without rope (SmolLM3) and a sliding window (Mistral: masked, its KV is kept) are flags of
`ModelConfig`. Names are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import Tensor

from rootlet.config.model import ModelConfig
from rootlet.layers.linear import Linear
from rootlet.layers.mlp import GatedMLP
from rootlet.layers.norm import RMSNorm
from rootlet.layers.radix_attention import RadixAttention
from rootlet.layers.rope import RotaryEmbedding
from rootlet.layers.weights import WeightSource
from rootlet.models.causal_lm import CausalLM


class LlamaAttention:
    __slots__ = ("attention", "k_norm", "o_proj", "q_norm", "qkv_proj", "rope")

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str, *, layer_id: int, rope: RotaryEmbedding | None) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = (q_size, kv_size, kv_size)
        self.qkv_proj = Linear.load(source, f"{prefix}.qkv_proj", rows=rows, cols=config.hidden_size, bias=config.attention_bias, normed=True)
        self.o_proj = Linear.load(source, f"{prefix}.o_proj", rows=(config.hidden_size,), cols=q_size, bias=config.output_bias)
        self.q_norm = self._head_norm(config, source, f"{prefix}.q_norm")
        self.k_norm = self._head_norm(config, source, f"{prefix}.k_norm")
        self.rope = rope
        self.attention = RadixAttention(layer_id, config.head_dim**-0.5, config.sliding_window[layer_id] if config.sliding_window else None)

    @staticmethod
    def _head_norm(config: ModelConfig, source: WeightSource, name: str) -> RMSNorm | None:
        return RMSNorm.load(source, name, size=config.head_dim, eps=config.rms_eps) if config.qk_norm else None

    def __call__(self, x: Tensor, positions: Tensor, *, residual: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)
        q, k, v = self.qkv_proj.split(qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.per_head(q), self.k_norm.per_head(k)
            if self.rope is not None:
                q, k = self.rope(q, positions), self.rope(k, positions)
        elif self.rope is not None:  # q and k lie side by side: one op turns the heads of both
            qk = self.rope(qkv[:, : q.shape[1] + k.shape[1]], positions)
            q, k = qk[:, : q.shape[1]], qk[:, q.shape[1] :]
        return self.o_proj(self.attention(q, k, v), residual=residual)


class LlamaLayer:
    __slots__ = ("attention", "input_norm", "mlp", "mlp_norm")

    def __init__(self, config: ModelConfig, source: WeightSource, layer_id: int, *, rope: RotaryEmbedding) -> None:
        prefix, hidden = f"model.layers.{layer_id}", config.hidden_size
        without_rope = bool(config.nope_layers) and config.nope_layers[layer_id]
        self.input_norm = RMSNorm.load(source, f"{prefix}.input_layernorm", size=hidden, eps=config.rms_eps)
        self.attention = LlamaAttention(config, source, f"{prefix}.self_attn", layer_id=layer_id, rope=None if without_rope else rope)
        self.mlp_norm = RMSNorm.load(source, f"{prefix}.post_attention_layernorm", size=hidden, eps=config.rms_eps)
        self.mlp = GatedMLP(source, f"{prefix}.mlp", hidden=hidden, inner=config.intermediate_size, bias=config.mlp_bias)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.attention(self.input_norm(x), positions, residual=x)
        return self.mlp(self.mlp_norm(x), residual=x)


def build(config: ModelConfig, source: WeightSource, *, max_len: int) -> CausalLM:
    """Loads a model of this family for positions below `max_len`."""
    rope = RotaryEmbedding(config.rope, config.head_dim, max_len)
    return CausalLM(config, source, lambda layer_id: LlamaLayer(config, source, layer_id, rope=rope))
