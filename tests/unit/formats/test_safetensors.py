"""Safetensors checkpoints: shards, index, dtypes, and every way in which they can be incomplete."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.tiny_models import make_hf_checkpoint, read_hf_tensors
from rootlet.config.model_load import load_model_config
from rootlet.core.errors import BadModelFile
from rootlet.formats.weights import dequantize, open_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_checkpoint(tmp_path_factory.mktemp("hf"), "llama", num_hidden_layers=3, max_shard_size="110KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


@pytest.fixture
def sharded(sharded_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_once, tmp_path / "m"))


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def assert_equal_to_library(folder: Path, reference: dict[str, np.ndarray]) -> None:
    weights = open_weights(folder)
    assert sorted(weights.names()) == sorted(reference)
    for name, array in reference.items():
        np.testing.assert_array_equal(dequantize(weights.get(name)), array)


def test_row_73_shards_with_and_without_index(sharded: Path) -> None:
    reference = read_hf_tensors(sharded)
    assert_equal_to_library(sharded, reference)
    (sharded / INDEX).unlink()
    assert_equal_to_library(sharded, reference)


def test_row_73_missing_shard_is_named(sharded: Path) -> None:
    shard = shard_of(sharded, "model.layers.1.mlp.up_proj.weight")
    shard.unlink()
    with pytest.raises(BadModelFile, match=rf"shard {shard.name}, named in .*, is missing"):
        load_model_config(sharded)
    (sharded / INDEX).unlink()
    with pytest.raises(BadModelFile, match=rf"missing shards: {shard.name}"):
        load_model_config(sharded)


def test_row_73_index_names_a_tensor_that_no_shard_has(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard_of(sharded, "model.norm.weight").name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadModelFile, match=r"tensor model\.layers\.9\.mlp\.up_proj\.weight.*is missing"):
        open_weights(sharded)


def test_row_73_index_lacks_a_needed_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadModelFile, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model_config(sharded)


def test_row_73_index_wins_over_an_extra_tensor(sharded: Path) -> None:
    reference = read_hf_tensors(sharded)
    name = "model.norm.weight"
    other = next(p for p in sorted(sharded.glob("model-*.safetensors")) if p != shard_of(sharded, name))
    save_file({**load_file(other), name: torch.full((64,), 99.0)}, other)
    assert_equal_to_library(sharded, reference)
    (sharded / INDEX).unlink()
    with pytest.raises(BadModelFile, match=rf"tensor {name} is also in"):
        open_weights(sharded)


def test_row_73_two_models_in_one_folder_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    for path in list(sharded.glob("model-*.safetensors")):
        shutil.copy(path, path.with_name(path.name.replace("model-", "other-")))
    with pytest.raises(BadModelFile, match="several models"):
        open_weights(sharded)


def test_row_73_truncated_shard_is_named(sharded: Path) -> None:
    shard = shard_of(sharded, "model.norm.weight")
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(BadModelFile, match=rf"{shard.name}: truncated: tensor"):
        open_weights(sharded)
    shard.write_bytes(b"\xff" * 64)
    with pytest.raises(BadModelFile, match="truncated or not a safetensors file"):
        open_weights(sharded)


def test_row_73_index_cannot_leave_the_folder(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(BadModelFile, match="not a plain file name"):
        open_weights(sharded)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16")])
@pytest.mark.parametrize("family", ["llama", "smollm2"])
def test_row_75_dtypes_tied_and_untied(tmp_path: Path, family: str, dtype: str, kind: str) -> None:
    folder = make_hf_checkpoint(tmp_path / "m", family, dtype=dtype, num_hidden_layers=1)
    config = load_model_config(folder)
    assert (config.dtype, config.quant, config.tie_embeddings) == (dtype, dtype, family == "smollm2")
    raw = open_weights(folder).get("model.embed_tokens.weight")
    assert (raw.kind, raw.shape, raw.data.shape) == (kind, (272, 64), (272, 64))
    np.testing.assert_array_equal(dequantize(raw), read_hf_tensors(folder)["model.embed_tokens.weight"])


def test_shape_mismatch_is_named(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(BadModelFile, match=r"mlp\.gate_proj\.weight has shape \[96, 64\], expected \[128, 64\]"):
        load_model_config(sharded)


def test_unused_tensors_are_logged(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with caplog.at_level(logging.WARNING):
        load_model_config(sharded)
    assert "unused_tensors" in caplog.text


def test_nothing_to_load_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadModelFile, match="can run code and are not loaded"):
        open_weights(tmp_path)
    with pytest.raises(BadModelFile, match="no such file"):
        open_weights(tmp_path / "absent")


def test_bare_decoder_names_get_the_prefix(tmp_path: Path) -> None:
    tensors = {name: torch.ones(2, 2) for name in ("embed_tokens.weight", "norm.weight", "lm_head.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(open_weights(tmp_path).names()) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]


def test_an_adapter_beside_the_model_is_not_the_model(tmp_path: Path) -> None:
    for name in ("model", "adapter_model"):
        save_file({f"{name}.norm.weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert open_weights(tmp_path).names() == ["model.norm.weight"]
