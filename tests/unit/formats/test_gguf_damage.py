"""Damaged GGUF files: whatever a number in the header says, the file is refused in words or loads; never gigabytes, never a hang, never a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.gguf_damage import damaged, open_all
from fixtures.tiny_models import make_hf_checkpoint, write_gguf


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("damage")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return write_gguf(make_hf_checkpoint(folder / "model", "llama", **sizes), folder / "model.gguf").read_bytes()


def faults(folder: Path, files: list[bytes], *, timeout_s: float) -> dict[str, str]:
    """Every file that neither loads nor is refused in words."""
    paths = [folder / f"{i:05d}.gguf" for i in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    found = open_all(paths, timeout_s=timeout_s)
    return {name: outcome for name, outcome in found.items() if not outcome.startswith(("loaded", "refused"))}


def test_damaged_headers_are_refused_in_words(raw: bytes, tmp_path: Path) -> None:
    files = list(damaged(raw, seed=0, random_count=40))
    assert faults(tmp_path, files[::24], timeout_s=240.0) == {}


@pytest.mark.parametrize("at", [0, 1])
def test_an_absurd_context_takes_no_memory(raw: bytes, tmp_path: Path, at: int) -> None:
    """What once ate 22 GB: tables of positions made before anyone asked whether they fit."""
    keys = (b"llama.context_length", b"llama.rope.dimension_count")
    start = raw.index(keys[at]) + len(keys[at]) + 4
    changed = [raw[:start] + value.to_bytes(4, "little") + raw[start + 4 :] for value in (0, 2**31 - 1, 2**32 - 1)]
    assert faults(tmp_path, changed, timeout_s=240.0) == {}


@pytest.mark.slow
def test_every_number_of_a_header_at_every_extreme(raw: bytes, tmp_path: Path) -> None:
    assert faults(tmp_path, list(damaged(raw, seed=1, random_count=1000)), timeout_s=1200.0) == {}
