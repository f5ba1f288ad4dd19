"""The list of tensors that a file is checked against before torch is loaded says what the layers ask for while they are built: names and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fixtures.tiny_models import FAMILIES, make_hf_checkpoint
from rootlet.config.model_load import load_model_config
from rootlet.config.model_tensors import expected_tensors
from rootlet.kernels.ops import Weight
from rootlet.models.registry import MODELS


class Asked:
    """A `WeightSource` that only notes what it is asked for."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _note(self, name: str, *shape: int) -> None:
        assert name not in self.shapes, f"{name} is asked for twice"
        self.shapes[name] = shape

    def has(self, name: str) -> bool:
        return False

    def matrix(self, names: tuple[str, ...], rows: tuple[int, ...], *, cols: int) -> Weight:
        for name, n in zip(names, rows, strict=True):
            self._note(name, n, cols)
        return Weight("f32", sum(rows), cols, None)

    def table(self, name: str, *, rows: int, cols: int, also_linear: bool) -> Weight:
        self._note(name, rows, cols)
        return Weight("f32", rows, cols, None)

    def vector(self, names: tuple[str, ...], rows: tuple[int, ...]) -> Tensor:
        for name, n in zip(names, rows, strict=True):
            self._note(name, n)
        return torch.zeros(sum(rows))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_list_is_what_the_layers_ask_for(tmp_path: Path, family: str, tied: bool) -> None:
    config = load_model_config(make_hf_checkpoint(tmp_path, family, tie_word_embeddings=tied))
    asked = Asked()
    MODELS.get(config.arch)(config, asked, max_len=64)
    assert expected_tensors(config) == asked.shapes
