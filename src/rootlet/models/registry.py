"""Which file builds which architecture (`ModelConfig.arch`). A new dense model is one file and one line here."""

from __future__ import annotations

from typing import Protocol

from rootlet.config.model import ModelConfig
from rootlet.core.registry import Registry
from rootlet.layers.weights import WeightSource
from rootlet.models import llama
from rootlet.models.causal_lm import CausalLM


class ModelBuilder(Protocol):
    def __call__(self, config: ModelConfig, source: WeightSource, *, max_len: int) -> CausalLM: ...


MODELS: Registry[ModelBuilder] = Registry("model architecture")
MODELS.register("llama")(llama.build)


def build_model(config: ModelConfig, source: WeightSource, *, max_len: int) -> CausalLM:
    """The loaded model. Raises `BadConfig` when nobody builds `config.arch`."""
    return MODELS.get(config.arch)(config, source, max_len=max_len)
