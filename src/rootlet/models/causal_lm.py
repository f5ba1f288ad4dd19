"""`CausalLM`: the frame of every decoder-only model: embedding -> layers -> final norm -> head.

A model file gives the layer; this file gives the rest. Constructing it loads it (layers/weights.py). Only rows whose logits are needed go through
the final norm and the head, so `forward` returns hidden states and `logits` is a second call on the rows of choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from rootlet.config.model import ModelConfig
from rootlet.kernels import ops
from rootlet.layers.embedding import Embedding
from rootlet.layers.linear import Linear
from rootlet.layers.norm import RMSNorm
from rootlet.layers.weights import WeightSource


class DecoderLayer(Protocol):
    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x float32 [T, hidden], positions int32 [T] -> [T, hidden]."""
        ...


class CausalLM:
    __slots__ = ("config", "embed", "head", "layers", "norm")

    def __init__(self, config: ModelConfig, source: WeightSource, make_layer: Callable[[int], DecoderLayer]) -> None:
        """`make_layer(i)` constructs, and thereby loads, layer i."""
        self.config = config
        self.embed = Embedding.load(source, "model.embed_tokens", rows=config.vocab_size, cols=config.hidden_size, also_head=config.tie_embeddings)
        self.layers: Sequence[DecoderLayer] = [make_layer(i) for i in range(config.num_layers)]
        self.norm = RMSNorm.load(source, "model.norm", size=config.hidden_size, eps=config.rms_eps)
        tied = config.tie_embeddings
        self.head = self.embed.as_head() if tied else Linear.load(source, "lm_head", rows=(config.vocab_size,), cols=config.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """int32 [T] each -> hidden states before the final norm, float32 [T, hidden]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return x

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden [T, hidden], rows int32 [R] -> float32 [R, V]."""
        return self.head(self.norm(ops.table().gather_rows(hidden, rows)))
