"""Which linears of a model quantise their inputs in two planes: those inside the layers that read what a norm made, and no others (decision 5)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fixtures.tiny_models import FAMILIES, make_hf_checkpoint
from rootlet.config.model_load import load_model_config
from rootlet.kernels.ops import Weight
from rootlet.models.llama import LlamaLayer
from rootlet.models.registry import build_model


class Shapes:
    """A source of empty weights."""

    def matrix(self, names: tuple[str, ...], rows: tuple[int, ...], *, cols: int) -> Weight:
        return Weight("f32", sum(rows), cols, None)

    def table(self, name: str, *, rows: int, cols: int, also_linear: bool) -> Weight:
        return Weight("f32", rows, cols, None)

    def vector(self, names: tuple[str, ...], rows: tuple[int, ...]) -> Tensor:
        return torch.ones(sum(rows))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"mistral_swa"}))
def test_a_linear_behind_a_norm_knows_it(family: str, tmp_path: Path) -> None:
    model = build_model(load_model_config(make_hf_checkpoint(tmp_path, family)), Shapes(), max_len=64)
    assert not model.head.normed, "it would cost a tenth of the head and gain nothing that can be measured"
    assert len(model.layers) == 4
    for layer in model.layers:
        assert isinstance(layer, LlamaLayer)
        assert layer.attention.qkv_proj.normed
        assert layer.mlp.gate_up.normed
        assert not layer.attention.o_proj.normed
        assert not layer.mlp.down.normed
