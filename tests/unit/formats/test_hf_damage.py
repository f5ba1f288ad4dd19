"""Damaged model folders: whatever a value of a JSON file or of a safetensors header is, the folder is refused in words or loads; no crash."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.gguf_damage import open_all
from fixtures.tiny_models import make_hf_checkpoint
from rootlet.core.errors import BadModelFile
from rootlet.formats.weights import open_weights

HALF = "x\ud800"  # what JSON can spell and no UTF-8 can hold
VALUES: tuple[Any, ...] = (
    None,
    "x",
    [],
    {},
    [1],
    [None],
    {"a": 1},
    True,
    -1,
    0,
    2**31,
    2**63,
    10**30,
    math.inf,
    math.nan,
    0.5,
    1e-320,
    HALF,
    {HALF: HALF},
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_KEYS = ("rope_type", *ROPE, "beta_fast", "beta_slow", "attention_factor", "mscale", "partial_rotary_factor")
NAME = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_hf_checkpoint(tmp_path_factory.mktemp("damage") / "model", "smollm3", **sizes)


def with_header(raw: bytes, header: Any) -> bytes:
    """The safetensors file `raw` with another header (bytes, or what json makes bytes of)."""
    made = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(made)) + made + raw[8 + struct.unpack_from("<Q", raw)[0] :]


def header_of(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw[8 : 8 + struct.unpack_from("<Q", raw)[0]])
    return found


def damaged_json(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(file, its damaged content): every key of the JSON files with every value of VALUES."""
    config = json.loads((folder / "config.json").read_text())
    extra = ("rope_scaling", "layer_types", "sliding_window", "no_rope_layer_interval", "head_dim", "quantization_config")
    for value in VALUES:
        for key in dict.fromkeys((*config, *extra)):
            yield "config.json", json.dumps({**config, "use_sliding_window": True, key: value}).encode()
        for kind in ("linear", "llama3", "yarn"):
            for key in ROPE_KEYS:
                yield "config.json", json.dumps({**config, "rope_parameters": {"rope_type": kind, **ROPE, key: value}}).encode()
        for file, keys in (("generation_config.json", ("eos_token_id", "top_k")), ("tokenizer_config.json", ("eos_token", "added_tokens_decoder"))):
            content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
            for key in (*content, *keys):
                yield file, json.dumps({**content, key: value}).encode()


def damaged_weights(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """(file, its damaged content): the header's values, its nesting, its length; the index."""
    header = header_of(raw)
    pairs = ([0, 64], [64, 0], [-64, 0], [2**63, 2**63 + 64], [-16], [16, 1], [-1, -16], [math.inf], [math.nan, 1])
    for value in (*VALUES, *pairs):
        for key in ("dtype", "shape", "data_offsets"):
            yield WEIGHTS, with_header(raw, {**header, NAME: {**header[NAME], key: value}})
        yield WEIGHTS, with_header(raw, {**header, NAME: value})
        yield INDEX, json.dumps({"weight_map": value}).encode()
        yield INDEX, json.dumps({"weight_map": {NAME: value}}).encode()
    for header_bytes in (b"[" * 200_000, b'{"a":' * 200_000, b"[]", b"\xff\xfe"):
        yield WEIGHTS, with_header(raw, header_bytes)
    for length in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield WEIGHTS, struct.pack("<Q", length) + raw[8:]
    for size in (0, 1, 7, 8, 9, 100, len(raw) - 1):
        yield WEIGHTS, raw[:size]


def outcomes(model: Path, base: Path, cases: list[tuple[str, bytes]], *, timeout_s: float) -> dict[str, str]:
    """What became of each folder, by what was written into it."""
    written = {}
    for i, (file, content) in enumerate(cases):
        folder = Path(shutil.copytree(model, base / str(i)))
        (folder / file).write_bytes(content)
        written[str(folder)] = f"{file} {i} {content[:4000]!r}"
    found = open_all([Path(p) for p in written], timeout_s=timeout_s)
    return {written[path]: outcome for path, outcome in found.items()}


def faults(model: Path, base: Path, cases: list[tuple[str, bytes]], *, timeout_s: float) -> dict[str, str]:
    """Every folder that neither loads nor is refused in words."""
    return {case: end for case, end in outcomes(model, base, cases, timeout_s=timeout_s).items() if not end.startswith(("loaded", "refused"))}


def test_damaged_folders_are_refused_in_words(model: Path, tmp_path: Path) -> None:
    weights = list(damaged_weights((model / WEIGHTS).read_bytes()))
    assert faults(model, tmp_path, [*list(damaged_json(model))[::61], *weights[::7]], timeout_s=240.0) == {}


JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.json")


def with_text(value: Any, text: str) -> Iterator[Any]:
    """`value` with `text` in the place of each of its strings, one at a time, and as a new entry of each object."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, list):
        yield from ([*value[:i], changed, *value[i + 1 :]] for i, item in enumerate(value[:3]) for changed in with_text(item, text))
    elif isinstance(value, dict):
        yield from ({**value, key: changed} for key in list(value)[:12] for changed in with_text(value[key], text))
        yield {**value, text: 1}
        yield {**value, "unheard_of": text}


def test_a_lone_surrogate_anywhere_is_refused_with_its_place(model: Path, tmp_path: Path) -> None:
    """Not by a UnicodeEncodeError when the server is up and the token, the name or the template is first used."""
    cases = []
    for file in JSON_FILES:
        content = json.loads((model / file).read_text()) if (model / file).exists() else {"chat_template": "x"}
        cases += [(file, json.dumps(changed).encode()) for changed in with_text(content, HALF)]
    assert len(cases) > 40
    found = outcomes(model, tmp_path, cases, timeout_s=240.0)
    assert len(found) == len(cases)
    assert not [case for case, outcome in found.items() if not re.search(rf"refused.*{case.split()[0]}: .* holds a lone surrogate", outcome)], found


def test_whole_pairs_stay_and_a_template_file_that_is_not_utf8_is_refused(model: Path, tmp_path: Path) -> None:
    """An emoji as two escapes is a pair, and a backslash before \\ud83d is no escape at all."""
    content = json.dumps({"chat_template": "{{ messages[0].content }}\U0001f680 \\ud83d", "bos_token": "\U0001f680"})
    assert "\\ud83d\\ude80" in content
    cases = [("tokenizer_config.json", content.encode()), ("chat_template.jinja", b"{{ messages }}\xed\xa0\x80")]
    whole, broken = outcomes(model, tmp_path, cases, timeout_s=240.0).values()
    assert whole == "loaded"
    assert re.match(r"refused.*chat_template\.jinja: cannot be read", broken)


@pytest.mark.slow
def test_every_value_of_every_json_file(model: Path, tmp_path: Path) -> None:
    cases = [*damaged_json(model), *damaged_weights((model / WEIGHTS).read_bytes())]
    assert faults(model, tmp_path, cases, timeout_s=1200.0) == {}


@pytest.mark.parametrize("nested", [b"[" * 200_000, b'{"a":' * 200_000])
def test_a_deeply_nested_header_is_damage(model: Path, tmp_path: Path, nested: bytes) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(with_header((model / WEIGHTS).read_bytes(), nested))
    with pytest.raises(BadModelFile, match=r"model\.safetensors: its safetensors header cannot be read"):
        open_weights(path)


def test_a_tensor_named_twice_is_damage(model: Path, tmp_path: Path) -> None:
    raw = (model / WEIGHTS).read_bytes()
    header = json.dumps(header_of(raw))
    other = json.dumps({NAME: header_of(raw)["model.layers.0.input_layernorm.weight"]})
    (tmp_path / WEIGHTS).write_bytes(with_header(raw, (header[:-1] + "," + other[1:]).encode()))
    with pytest.raises(BadModelFile, match="a name occurs twice"):
        open_weights(tmp_path / WEIGHTS)


def test_tensors_that_share_bytes_are_damage(model: Path, tmp_path: Path) -> None:
    raw = (model / WEIGHTS).read_bytes()
    header = header_of(raw)
    header[NAME]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]
    (tmp_path / WEIGHTS).write_bytes(with_header(raw, header))
    with pytest.raises(BadModelFile, match=r"tensors model\.layers\.0\.input_layernorm\.weight and model\.norm\.weight overlap"):
        open_weights(tmp_path / WEIGHTS)


@pytest.mark.parametrize("value", [1, [], None])
def test_an_index_that_places_a_tensor_nowhere_is_refused(model: Path, tmp_path: Path, value: Any) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    (folder / INDEX).write_text(json.dumps({"weight_map": {NAME: value}}))
    with pytest.raises(BadModelFile, match="no usable weight_map"):
        open_weights(folder)
