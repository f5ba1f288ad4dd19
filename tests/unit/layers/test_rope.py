"""The cos/sin table of each rope kind against transformers' own frequency functions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rootlet.config.model import RopeConfig
from rootlet.core.errors import BadModelFile
from rootlet.layers.rope import cos_sin_table

HEAD_DIM = 32
CASES = [
    (RopeConfig("linear", 10000.0, HEAD_DIM, factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    (
        RopeConfig("llama3", 500000.0, HEAD_DIM, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=128),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    ),
    (
        RopeConfig("yarn", 10000.0, HEAD_DIM, factor=4.0, original_max_len=256),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ),
    (
        RopeConfig("yarn", 10000.0, HEAD_DIM, factor=4.0, original_max_len=16),  # the blend would begin before dimension 0
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    (
        RopeConfig("yarn", 10000.0, HEAD_DIM, factor=4.0, original_max_len=256, attention_factor=1.25, beta_fast=16.0, beta_slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "attention_factor": 1.25,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
]


@pytest.mark.parametrize("rope, parameters", CASES, ids=["linear", "llama3", "yarn", "yarn-short", "yarn-given-factor"])
def test_scaled_kinds_match_transformers(rope: RopeConfig, parameters: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": rope.theta, **parameters},
    )
    freqs, magnitude = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(200, dtype=torch.float64), freqs.to(torch.float64))
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude
    torch.testing.assert_close(cos_sin_table(rope, 200).to(torch.float64), expected, atol=2e-5, rtol=0)


def test_default_is_the_formula() -> None:
    table = cos_sin_table(RopeConfig("default", 100.0, 4), 3)
    frequencies = torch.tensor([1.0, 0.1])
    torch.testing.assert_close(table[2], torch.cat(((2 * frequencies).cos(), (2 * frequencies).sin())))


def test_factors_divide_frequencies_before_the_kind() -> None:
    plain = cos_sin_table(RopeConfig("default", 100.0, 4), 5)
    divided = cos_sin_table(RopeConfig("linear", 100.0, 4, factor=2.0, factors=(0.5, 2.0)), 5)
    torch.testing.assert_close(divided[4, 0], plain[4, 0])  # 4 * f / 0.5 / 2 = 4 * f
    torch.testing.assert_close(divided[4, 1], plain[1, 1])  # 4 * f / 2 / 2 = 1 * f


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(BadModelFile, match="dynamic"):
        cos_sin_table(RopeConfig("dynamic", 100.0, 4), 5)
