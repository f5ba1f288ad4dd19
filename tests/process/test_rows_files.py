"""Rows GGUF and SAFETENSORS of the fault table (69, 70, 71, 73, 75) and 97: files as people have them, given to `rootlet serve`.

What loads must say what transformers says of the same weights; what does not must end the start within seconds, with words that name the culprit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from fixtures.granted import Granted
from fixtures.hf_forward import logprobs_of
from fixtures.tiny_models import make_hf_checkpoint, write_gguf
from fixtures.tiny_tokenizers import torture_strings
from fixtures.wire import post, whole
from rootlet.bench.server_process import ServerProcess, running_server

pytestmark = pytest.mark.process

IDS = [int(i) for i in np.random.default_rng(4).integers(0, 256, 40)]
SMALL = ("--max-total-tokens", "512", "--max-running", "2", "--ctx-len", "256")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied head and Llama 3's rope factors."""
    return make_hf_checkpoint(tmp_path_factory.mktemp("tied") / "m", "llama31", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_checkpoint(tmp_path_factory.mktemp("plain") / "m", "llama", num_hidden_layers=2)


@contextlib.contextmanager
def serving(path: Path, *flags: str) -> Iterator[ServerProcess]:
    with running_server(str(path), *SMALL, *flags, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        yield server


def prompt_logprobs(base: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of IDS[1:], each after those before it."""
    choice = whole(base, "/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0})["choices"][0]
    return np.array(choice["logprobs"]["token_logprobs"][1 : len(IDS)], dtype=np.float64)


def reference(folder: Path, dtype: str = "float32") -> np.ndarray[Any, np.dtype[np.float64]]:
    table = logprobs_of(folder, IDS, dtype=dtype)
    return np.array([table[i - 1][IDS[i]] for i in range(1, len(IDS))])


def refused_start(path: Path, *, names: str) -> str:
    """`rootlet serve` ends by itself with code 2 and names `names`; no traceback. Returns what it printed."""
    command = [sys.executable, "-m", "rootlet.cli.main", "serve", str(path), *SMALL, "--port", "0"]
    with Granted() as clock:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert clock.now_s() < 20.0  # 5 s on an idle machine
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert names in text, text
    assert "Traceback" not in text
    assert "ready on" not in text
    return text


def refused_starts(cases: dict[str, Path]) -> None:
    """`refused_start` of each path, by the words that must come; two at a time."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(refused_start, path, names=names) for names, path in cases.items()]:
            done.result()


def test_row_69_tied_head_and_rope_factors(tied: Path, tmp_path: Path) -> None:
    with serving(write_gguf(tied, tmp_path / "m.gguf")) as server:
        np.testing.assert_allclose(prompt_logprobs(server.base), reference(tied), atol=1e-3)


def test_row_69_quantised_within_tolerance(tied: Path, tmp_path: Path) -> None:
    """8 bits: the logits of this model lie tens apart, so the measure is their size."""
    with serving(write_gguf(tied, tmp_path / "m.gguf", kind="q8_0")) as server:
        found, wanted = prompt_logprobs(server.base), reference(tied)
    assert np.abs(found - wanted).mean() < 0.02 * np.abs(wanted).mean()


def test_row_69_missing_and_unknown_tensors_are_refused_by_name(plain: Path, tmp_path: Path) -> None:
    """What the model has no place for might change what it means, so it is not dropped."""
    extra = {"blk.0.mystery.weight": np.ones((4, 4), dtype=np.float32)}
    refused_starts({
        "layers.1.mlp.up_proj": write_gguf(plain, tmp_path / "missing.gguf", skip=("blk.1.ffn_up.weight",)),
        "blk.0.mystery.weight: the model has no place for it": write_gguf(plain, tmp_path / "extra.gguf", extra=extra),
    })  # fmt: skip


def test_row_70_gguf_ids_equal_transformers(plain: Path, tmp_path: Path) -> None:
    expected = AutoTokenizer.from_pretrained(plain)
    with serving(write_gguf(plain, tmp_path / "m.gguf")) as server:
        texts = [t for t in torture_strings() if t]
        found = post(server.base, "/tokenize", {"prompt": texts, "add_special_tokens": False}).json()["tokens"]
        wanted = [expected.encode(t, add_special_tokens=False) for t in texts]
        assert [t for t, a, b in zip(texts, found, wanted, strict=True) if a != b] == []


def test_row_70_a_missing_pre_tokenizer_is_loud_and_what_the_file_advises_is_used(plain: Path, tmp_path: Path) -> None:
    path = write_gguf(plain, tmp_path / "m.gguf", metadata={"general.sampling.temp": 0.0, "general.sampling.top_p": 0.5})
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.xxx"))
    with serving(path) as server:
        assert "pre_tokenizer_unknown" in server.log.read_text()
        assert json.loads(server.get("/model_info"))["preferred_sampling_params"] == {"temperature": 0.0, "top_p": 0.5}
        texts = {whole(server.base, "/v1/completions", {"prompt": "ab", "max_tokens": 10})["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 1  # temperature 0


@pytest.fixture
def pieces(plain: Path, tmp_path: Path) -> list[Path]:
    (tmp_path / "split").mkdir()
    write_gguf(plain, tmp_path / "split" / "m.gguf", split_max_tensors=8)
    found = sorted((tmp_path / "split").glob("*.gguf"))
    assert len(found) == 3
    return found


@pytest.mark.parametrize("given", [pytest.param("folder", marks=pytest.mark.slow), "second piece"])
def test_row_71_a_split_loads_from_any_end(plain: Path, pieces: list[Path], given: str) -> None:
    with serving(pieces[0].parent if given == "folder" else pieces[1]) as server:
        np.testing.assert_allclose(prompt_logprobs(server.base), reference(plain), atol=1e-3)


def test_row_71_broken_splits_are_refused_by_name(plain: Path, pieces: list[Path], tmp_path: Path) -> None:
    folder = pieces[0].parent
    missing, mixed, two = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("missing", "mixed", "two"))
    (missing / pieces[2].name).unlink()
    shutil.copy(pieces[1], mixed / pieces[2].name)
    write_gguf(plain, two / "other.gguf")
    cases = {f"missing: {pieces[2].name}": missing / pieces[0].name, f"{pieces[2].name}: it says": mixed, "other.gguf": two}
    refused_starts({**cases, "renamed.gguf": Path(shutil.copy(pieces[1], tmp_path / "renamed.gguf"))})


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = make_hf_checkpoint(tmp_path / "sharded", "llama", num_hidden_layers=2, max_shard_size="150KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def test_row_73_the_index_wins_over_a_stale_tensor(shards: Path) -> None:
    from safetensors.numpy import load_file, save_file

    wanted = reference(shards)
    index = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    name, home = next(iter(index.items()))
    other = next(file for file in sorted(set(index.values())) if file != home)
    tensors = load_file(shards / other)
    save_file({**tensors, name: np.zeros_like(load_file(shards / home)[name])}, shards / other, metadata={"format": "pt"})
    with serving(shards) as server:
        np.testing.assert_allclose(prompt_logprobs(server.base), wanted, atol=1e-3)


def test_row_73_incomplete_folders_are_refused_by_name(shards: Path, plain: Path, tmp_path: Path) -> None:
    second = sorted(shards.glob("model-*.safetensors"))[1].name
    gone, cut, ghost, unlisted = (Path(shutil.copytree(shards, tmp_path / name)) for name in ("gone", "cut", "ghost", "unlisted"))
    (gone / second).unlink()
    (cut / second).write_bytes((cut / second).read_bytes()[:-100])
    name = "model.safetensors.index.json"
    index = json.loads((shards / name).read_text())
    files = index["weight_map"]
    (ghost / name).write_text(json.dumps({**index, "weight_map": {**files, "model.ghost.weight": second}}))
    (unlisted / name).write_text(json.dumps({**index, "weight_map": {k: v for k, v in files.items() if k != "model.norm.weight"}}))
    two = Path(shutil.copytree(plain, tmp_path / "two"))
    shutil.copy(two / "model.safetensors", two / "another.safetensors")
    refused_starts({second: gone, f"{second}:": cut, "model.ghost.weight": ghost, "model.norm.weight": unlisted, "another.safetensors": two})


@pytest.mark.parametrize(
    ("stored", "asked"), [("bfloat16", "auto"), ("float16", "float32"), pytest.param("float32", "bfloat16", marks=pytest.mark.slow)]
)
def test_row_75_dtypes_are_stated_and_agree(tmp_path: Path, stored: str, asked: str) -> None:
    folder = make_hf_checkpoint(tmp_path / "m", "llama", num_hidden_layers=2, dtype=stored)
    with serving(folder, "--dtype", asked) as server:
        found = prompt_logprobs(server.base)
        info = json.loads(server.get("/model_info"))["model"]
        greedy = whole(server.base, "/v1/completions", {"prompt": IDS, "max_tokens": 1, "temperature": 0, "return_token_ids": True})["choices"][0]
    assert np.isfinite(found).all()
    held = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[stored if asked == "auto" else asked]
    assert (info["compute_dtype"], set(info["weights"])) == ("float32", {held})
    np.testing.assert_allclose(found, reference(folder), atol=1e-3 if asked == "float32" else 0.15)
    assert greedy["token_ids"][0] == int(logprobs_of(folder, IDS)[-1].argmax())


def test_row_97_no_code_of_a_model_folder_is_ever_run(plain: Path, tmp_path: Path) -> None:
    folder, marker = shutil.copytree(plain, tmp_path / "evil"), tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').write('ran')\nclass X: pass\n"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "sitecustomize.py", "conftest.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["tokenization_x.X", None]}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = folder / name
        document = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(
            json.dumps({**document, "auto_map": auto_map, "vision_config": {"auto_map": auto_map}, "text_config": {"auto_map": auto_map}})
        )
    with serving(folder) as server:
        assert whole(server.base, "/v1/completions", {"prompt": "a", "max_tokens": 2})["choices"]
        assert "auto_map_ignored" in server.log.read_text()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "x"}))
    assert "never run" in refused_start(folder, names="model_type 'x'")
    assert not marker.exists()
