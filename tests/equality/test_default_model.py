"""The default model against transformers running its weights dequantised by the gguf library: an oracle that shares no code with our path."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from fixtures.step_driver import StepDriver
from rootlet.config.model_load import load_model_config
from rootlet.config.schema import CacheArgs, RuntimeConfig, SchedulerArgs
from rootlet.core.types import LogprobSpec
from rootlet.engine.model_source import DEFAULT_MODEL, cache_folder
from rootlet.frontend.tokenizer import load_tokenizer
from rootlet.kernels import dispatch
from rootlet.runner.local_executor import LocalExecutor

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not dispatch.choose("auto", page_size=16).native, reason="on the reference kernels this takes minutes"),
]
TEXT = (
    "The history of the Roman Empire begins with the founding of the city of Rome. Over the next centuries it grew into a republic, and then "
    "an empire that ruled most of Europe, North Africa and the Near East. Its language, Latin, is the ancestor of French, Spanish and Italian."
)
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def oracle_logprobs(path: Path, ids: list[int]) -> torch.Tensor:
    """log-softmax [T, V] of transformers in float32."""
    tensors = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).astype("float32")) for t in gguf.GGUFReader(path).tensors}
    c = load_model_config(path)
    config = LlamaConfig(
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        intermediate_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_context_len,
        rms_norm_eps=c.rms_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )
    state = {"model.norm.weight": tensors["output_norm.weight"]}
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = tensors["token_embd.weight"]
    for layer in range(c.num_layers):
        for theirs, ours in LAYER.items():
            w = tensors[f"blk.{layer}.{theirs}.weight"]
            heads = {"attn_q": c.num_heads, "attn_k": c.num_kv_heads}.get(theirs)
            if heads is not None:  # rows 2i, 2i + 1 of a head are its rows i, i + d/2
                w = w.view(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
            state[f"model.layers.{layer}.{ours}.weight"] = w
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)


def test_logprobs_of_a_text() -> None:
    """Activations are quantised to int8 and KV to float16 on our side, so tokens agree mostly, and the text is about as likely."""
    path = Path(os.environ.get("ROOTLET_TEST_MODEL", cache_folder() / DEFAULT_MODEL.file_name))
    if not path.exists():
        pytest.skip(f"no default model at {path}")
    ids = list(load_tokenizer(path).encode(TEXT))
    executor = LocalExecutor(RuntimeConfig(cache=CacheArgs(max_total_tokens=1024), scheduler=SchedulerArgs(max_running=2)), path)
    driver = StepDriver(executor)
    driver.prefill(driver.add(ids, logprobs=LogprobSpec(top_n=1, prompt_start=0)))
    entries = driver.results[0].rows[0].prompt_logprobs
    executor.close()
    expected = oracle_logprobs(path, ids)
    ours = torch.tensor([entry.logprob for entry in entries])
    theirs = torch.stack([expected[i, token] for i, token in enumerate(ids[1:])])
    same_best = sum(entry.top_ids[0] == int(expected[i].argmax()) for i, entry in enumerate(entries))
    assert abs(float(ours.mean() - theirs.mean())) < 0.06
    assert same_best >= 0.9 * len(entries)
