"""Model files -> ModelConfig: each family, both formats; what is not served is refused with words. Oracle: transformers' own configs."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from fixtures.tiny_models import FAMILIES, make_hf_checkpoint, write_gguf
from rootlet.config.model import ModelConfig
from rootlet.config.model_load import load_model_config, load_sampling_defaults
from rootlet.config.model_load_hf import config_from_hf
from rootlet.config.model_tensors import expected_tensors
from rootlet.core.errors import BadModelFile
from rootlet.formats.gguf import GGUFFile
from rootlet.formats.weights import open_weights

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def from_json(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    return config_from_hf(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {family: make_hf_checkpoint(base / family, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_needs_exactly_the_tensors_that_transformers_saves(checkpoints: dict[str, Path], family: str) -> None:
    config = load_model_config(checkpoints[family])
    saved = {name for name in open_weights(checkpoints[family]).names() if not (config.tie_embeddings and name == "lm_head.weight")}
    assert set(expected_tensors(config)) == saved


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers(checkpoints: dict[str, Path], family: str) -> None:
    from transformers import AutoConfig

    ours, theirs = load_model_config(checkpoints[family]), AutoConfig.from_pretrained(checkpoints[family])
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.arch, ours.family) == ("llama", theirs.model_type)
    assert (ours.num_layers, ours.hidden_size, ours.head_dim, ours.num_kv_heads) == (4, 64, head_dim, 2)
    assert (ours.rope.kind, ours.rope.theta) == (theirs.rope_parameters["rope_type"], theirs.rope_parameters["rope_theta"])
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rms_eps == theirs.rms_norm_eps
    assert (ours.bos_token_id, ours.eos_token_ids) == (258, (259,))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_says_the_same_as_config_json(checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    hf, gguf = load_model_config(checkpoints[family]), load_model_config(write_gguf(checkpoints[family], tmp_path / "m.gguf"))
    same = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context_len")
    same += ("tie_embeddings", "attention_bias", "output_bias", "qk_norm", "nope_layers", "sliding_window", "bos_token_id")
    assert {key: getattr(gguf, key) for key in same} == {key: getattr(hf, key) for key in same}
    assert gguf.rms_eps == pytest.approx(hf.rms_eps)
    assert gguf.rope.theta == hf.rope.theta
    assert gguf.rope.interleaved == (family not in ("qwen2", "qwen3"))
    assert not hf.rope.interleaved
    assert gguf.eos_token_ids == (259, 257)


def test_flags_of_the_families(checkpoints: dict[str, Path]) -> None:
    loaded = {family: load_model_config(path) for family, path in checkpoints.items()}
    assert {f for f, c in loaded.items() if c.attention_bias} == {"qwen2"}
    assert not any(c.output_bias for c in loaded.values())
    assert {f for f, c in loaded.items() if c.qk_norm} == {"qwen3"}
    assert loaded["smollm3"].nope_layers == (False, False, False, True)
    assert loaded["mistral_swa"].sliding_window == (16, 16, 16, 16)
    assert loaded["mistral"].sliding_window == ()
    assert loaded["llama31"].rope.original_max_len == 64


def test_default_sliding_window_of_mistral_and_null(tmp_path: Path) -> None:
    assert from_json(tmp_path, model_type="mistral", max_position_embeddings=32768).sliding_window == (4096,) * 4
    assert from_json(tmp_path, model_type="mistral", sliding_window=None).sliding_window == ()
    assert from_json(tmp_path, model_type="mistral", max_position_embeddings=4096).sliding_window == ()


def test_qwen_window_by_layer(tmp_path: Path) -> None:
    config = from_json(tmp_path, model_type="qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert config.sliding_window == (None, None, 8, 8)
    assert from_json(tmp_path, model_type="qwen2", use_sliding_window=False, sliding_window=8).sliding_window == ()


@pytest.mark.parametrize("changes", [{}, {"no_rope_layers": [0, 1, 1, 0]}, {"layer_types": ["sliding_attention"] + ["full_attention"] * 3}])
def test_smollm3_slides_where_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    from transformers import SmolLM3Config

    settings = {"num_hidden_layers": 4, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8, **changes}
    theirs = SmolLM3Config(**settings, pad_token_id=None).layer_types
    ours = from_json(tmp_path, model_type="smollm3", **settings).sliding_window
    assert ours == tuple(8 if kind == "sliding_attention" else None for kind in theirs)
    assert from_json(tmp_path, model_type="smollm3", use_sliding_window=True).sliding_window == ()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, rope: dict[str, Any]) -> None:
    found = from_json(tmp_path, **rope).rope
    assert (found.kind, found.theta, found.factor) == ("linear", 5e5, 4.0)


def test_yarn_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for extra in ({}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {"attention_factor": 0.9}):
        spec = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024, **extra}
        reference = LlamaConfig(**{k: v for k, v in BASE.items() if k != "model_type"}, rope_parameters=spec)
        _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](reference, "cpu")
        assert from_json(tmp_path, rope_parameters=spec).rope.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt_neox"}, r"model_type 'gpt_neox' is not served; served are llama, mistral, qwen2, qwen3, smollm3"),
        ({"model_type": None}, "model_type None is not served"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not served"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected a positive whole number"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types holds 'linear_attention'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0; expected a positive whole number, or null"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types has 1 entries, expected 4"),
        ({"attention_multiplier": 0.5}, "attention_multiplier 0.5 is not served"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not served"),
        ({"use_qk_norm": True}, "use_qk_norm True is not served"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not served"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differ by layer type"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=false"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadModelFile, match=words):
        from_json(tmp_path, **changes)


def test_other_families_arithmetic_may_be_named_where_it_does_nothing(tmp_path: Path) -> None:
    assert from_json(tmp_path, logits_scaling=1.0, use_qk_norm=False, attn_logit_softcapping=None).family == "llama"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "low_freq_factor": float("nan")},
        {"rope_type": "llama3", "high_freq_factor": float("inf")},
        {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "beta_fast": float("inf")},
        {"rope_type": "yarn", "beta_slow": 1e-320},
        {"rope_type": "yarn", "attention_factor": float("inf")},
        {"rope_type": "yarn", "rope_theta": 1.0},
        {"rope_type": "linear", "factor": 0.0},
        {"rope_type": "default", "rope_theta": float("nan")},
    ],
)
def test_a_rope_that_gives_no_finite_angles_is_refused(checkpoints: dict[str, Path], tmp_path: Path, rope: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(checkpoints["llama"], tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    known = {"factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": {**known, **rope}}))
    with pytest.raises(BadModelFile, match=r"m: rope .* cannot be; the file is damaged"):
        load_model_config(folder)


def test_a_head_wider_than_any_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="head size 514 cannot be"):
        load_model_config(make_hf_checkpoint(tmp_path / "m", "llama", head_dim=514, num_hidden_layers=1))


def test_row_97_remote_code_is_never_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = tmp_path / "ran"
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')")
    auto_map = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with caplog.at_level(logging.WARNING):
        assert from_json(tmp_path, auto_map=auto_map, vision_config={"auto_map": auto_map}).family == "llama"
    assert "auto_map_ignored" in caplog.text
    with pytest.raises(BadModelFile, match=r"'evil' is not served.*auto_map\), which is never run"):
        from_json(tmp_path, model_type="evil", auto_map=auto_map)
    assert not marker.exists()


def test_eos_ids_are_the_union(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    settings = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"9": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert from_json(tmp_path, eos_token_id=6).eos_token_ids == (7, 8, 6, 9)


def test_partial_rope_is_read_from_either_place(tmp_path: Path) -> None:
    assert from_json(tmp_path, partial_rotary_factor=0.5).rope.rotary_dim == 8
    assert from_json(tmp_path, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}).rope.rotary_dim == 4


def test_only_control_tokens_of_a_gguf_end_a_turn(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_gguf(checkpoints["llama"], tmp_path / "m.gguf")
    types = GGUFFile(path).numbers("tokenizer.ggml.token_type").copy()
    start = path.read_bytes().index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 16
    end_texts = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"]
    tokens = GGUFFile(path).strings("tokenizer.ggml.tokens")
    ends = [i for i, text in enumerate(tokens) if text in end_texts]
    assert load_model_config(path).eos_token_ids == (259, *(i for i in ends if i != 259))
    types[ends] = 1  # plain text that looks like the end of a turn
    data = bytearray(path.read_bytes())
    data[start : start + types.nbytes] = types.tobytes()
    path.write_bytes(data)
    assert load_model_config(path).eos_token_ids == (259,)


def test_damaged_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadModelFile, match=r"config\.json: cannot be read as JSON"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadModelFile, match=r"no config\.json in this folder"):
        load_model_config(tmp_path)


def test_unserved_gguf_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_gguf(checkpoints["llama"], tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(b"general.architecture") + len(b"general.architecture") + 12
    path.write_bytes(data[:at] + b"lxama" + data[at + 5 :])
    with pytest.raises(BadModelFile, match=r"architecture 'lxama' is not served; served are llama, qwen2, qwen3, smollm3"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.attention.causal": False}, r"m\.gguf: llama\.attention\.causal False is not served"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale 0\.5 is not served"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale 0\.5 is not served"),
        ({"llama.attn_logit_softcapping": 50.0}, r"llama\.attn_logit_softcapping 50\.0 is not served"),
        ({"llama.expert_count": 8}, "a mixture of 8 experts"),
        ({"llama.attention.sliding_window": [16, 32]}, r"llama\.attention\.sliding_window differs by layer"),
        ({"llama.attention.sliding_window_pattern": 2}, r"llama\.attention\.sliding_window_pattern 2 is not served"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not served"),
    ],
)
def test_what_a_gguf_asks_for_and_is_not_served_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, metadata: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadModelFile, match=words):
        load_model_config(write_gguf(checkpoints["llama"], tmp_path / "m.gguf", metadata=metadata))


def test_keys_and_values_of_other_widths_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = write_gguf(checkpoints["llama"], tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(b"llama.attention.value_length") + len(b"llama.attention.value_length") + 4
    path.write_bytes(data[:at] + (8).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(BadModelFile, match="key_length 16 and value_length 8 differ"):
        load_model_config(path)


@pytest.mark.parametrize(("stated", "kind"), [({}, "linear"), ({"llama.rope.scaling.type": "none"}, "default")])
def test_a_gguf_factor_counts_unless_scaling_is_none(checkpoints: dict[str, Path], tmp_path: Path, stated: dict[str, Any], kind: str) -> None:
    metadata = {"llama.rope.scaling.factor": 4.0, **stated}
    assert load_model_config(write_gguf(checkpoints["llama"], tmp_path / "m.gguf", metadata=metadata)).rope.kind == kind


def test_advice_that_no_request_could_follow_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    advice = {"temperature": -1, "top_p": 1.5, "top_k": 40, "min_p": "much", "repetition_penalty": float("nan")}
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **advice}))
    with caplog.at_level(logging.WARNING):
        assert load_sampling_defaults(tmp_path) == {"top_k": 40}
    assert caplog.text.count("sampling_default_ignored") == 3


def test_sampling_defaults(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    made = tmp_path / "generation_config.json"
    (tmp_path / "model.safetensors").write_bytes(b"")
    made.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 1}))
    assert load_sampling_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    made.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.05}))
    assert load_sampling_defaults(tmp_path) == {"repetition_penalty": 1.05}
    path = write_gguf(checkpoints["llama"], tmp_path.parent / "sampling.gguf", metadata={"general.sampling.temp": 0.5})
    assert load_sampling_defaults(path) == {"temperature": 0.5}
