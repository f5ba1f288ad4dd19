"""Rope settings of a model file -> `RopeConfig`: old and new Hugging Face spellings. Pure functions on dictionaries."""

from __future__ import annotations

import math
from typing import Any

from rootlet.config.model import RopeConfig
from rootlet.core.errors import BadModelFile

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def rope_from_hf(config: dict[str, Any], *, head_dim: int, max_len: int, theta: float) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before). `theta` = the family's default.

    Raises: BadModelFile for a kind that is not served.
    """
    spec = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in spec.values()):
        raise BadModelFile("config.json: rope_parameters differ by layer type, which is not served.")
    kind = spec.get("rope_type") or spec.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise BadModelFile(f"config.json: rope_type {kind!r} is not served; served are {', '.join(ROPE_KINDS)}.")
    theta = float(spec.get("rope_theta") or config.get("rope_theta") or theta)
    partial = float(spec.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * partial)
    if kind == "default":
        return RopeConfig("default", theta, rotary_dim)
    original = int(spec.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or max_len)
    factor = spec.get("factor")
    if factor is None:
        if kind != "yarn":
            raise BadModelFile(f"config.json: rope_type {kind} without a factor.")
        factor = max_len / original
    if kind == "linear":
        return RopeConfig("linear", theta, rotary_dim, factor=float(factor))
    if kind == "llama3":
        low, high = float(spec.get("low_freq_factor", 1.0)), float(spec.get("high_freq_factor", 4.0))
        return RopeConfig("llama3", theta, rotary_dim, factor=float(factor), low_freq_factor=low, high_freq_factor=high, original_max_len=original)
    if spec.get("truncate") is False:
        raise BadModelFile("config.json: yarn with truncate=false is not served.")
    return RopeConfig(
        "yarn",
        theta,
        rotary_dim,
        factor=float(factor),
        original_max_len=original,
        attention_factor=_yarn_attention_factor(spec, float(factor)),
        beta_fast=float(spec.get("beta_fast") or 32.0),
        beta_slow=float(spec.get("beta_slow") or 1.0),
    )


def _yarn_attention_factor(spec: dict[str, Any], factor: float) -> float:
    """`attention_factor` if given; m(mscale) / m(mscale_all_dim) if both are; else m(1), with m(s) = 0.1 s ln(factor) + 1."""
    given = spec.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, all_dim = spec.get("mscale"), spec.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
