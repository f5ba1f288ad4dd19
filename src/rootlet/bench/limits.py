"""What a step must read and multiply at the least, from the model's configuration: the numerator of "percent of the machine's limits"."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rootlet.bench.workloads import PROMPT, Workload
from rootlet.config.model import ModelConfig
from rootlet.kv.mha import kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step: tokens that it computes, bytes of weights and KV, multiply-adds of the linear layers (attention is float, and left out)."""

    tokens: int
    num_bytes: int
    linear_macs: int


def layer_macs(config: ModelConfig) -> int:
    """Multiply-adds of one token in all layers' linears."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.num_layers * config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)


def step_cost(config: ModelConfig, work: Workload, *, weights_bytes: int, kv_dtype: str) -> StepCost:
    """Weights are read once a step, each row's KV once."""
    tokens = PROMPT if work.prefill else work.batch
    kv = kv_bytes_per_token(config, getattr(torch, kv_dtype)) * work.context * work.batch
    return StepCost(tokens, weights_bytes + kv, tokens * layer_macs(config) + work.batch * config.vocab_size * config.hidden_size)
