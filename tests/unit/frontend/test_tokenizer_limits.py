"""What a tokenizer knows from a text's length alone, and what damaged tokenizer files come to."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, normalizers, pre_tokenizers

from fixtures.fake_tokens import ByteTokens
from fixtures.tiny_tokenizers import HF_PRE, add_spm, byte_tokenizer, save_tokenizer, torture_strings, train_byte_bpe
from rootlet.config.schema import RuntimeConfig
from rootlet.core.errors import BadModelFile, ContextOverflow, PoolOverflow
from rootlet.frontend.tokenizer import Tokenizer, load_tokenizer
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.frontend.types import GenerateReq
from rootlet.ipc.messages import SchedulerReady

DECOMPOSED = unicodedata.normalize("NFD", "\u1f82\u01fb각")
TEXTS = [*torture_strings(), DECOMPOSED * 50, "\u2126\u212a\u1fef" * 50, "Ġ" * 90, "▁" * 90, " " * 999, "\u0000" * 99, "😀" * 99, "<|im_start|>" * 50]


def spm(folder: Path) -> Tokenizer:
    import numpy as np

    writer = GGUFWriter(folder / "spm.gguf", "llama")
    add_spm(writer)
    writer.add_tensor("token_embd.weight", np.zeros((320, 8), dtype=np.float32))
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        finish()
    return load_tokenizer(folder / "spm.gguf")


@pytest.mark.parametrize("kind", [*HF_PRE, "spm"])
def test_row_32_the_bound_is_below_the_true_count(tmp_path: Path, kind: str) -> None:
    found = spm(tmp_path) if kind == "spm" else Tokenizer(train_byte_bpe(kind))
    assert [t for t in TEXTS if found.min_tokens(t) > len(found.encode(t, add_special_tokens=False))] == []
    assert found.min_tokens("x" * 100_000) > 100


def without(backend: Any, *symbols: str) -> Any:
    """The tokenizer with these bytes missing from its vocabulary (and so dropped from texts), as small byte vocabularies have them."""
    document = json.loads(backend.to_str())
    for symbol in symbols:
        del document["model"]["vocab"][symbol]
    merges = document["model"]["merges"]
    document["model"]["merges"] = [m for m in merges if not set("".join(m)) & set(symbols)]
    document["model"]["vocab"] = {k: v for k, v in document["model"]["vocab"].items() if not set(k) & set(symbols)}
    return type(backend).from_str(json.dumps(document))


def test_row_32_bytes_that_a_vocabulary_lacks_are_left_out_of_the_bound() -> None:
    found = Tokenizer(without(byte_tokenizer(), "A", "Ċ", "ð"))  # A, newline, the first byte of an emoji
    texts = [*TEXTS, "A" * 500, "A\n" * 300, "xAyA" * 300, "\n" * 999 + "x" * 999, "😀" * 300 + "é" * 300]
    assert [t for t in texts if found.min_tokens(t) > len(found.encode(t, add_special_tokens=False))] == []
    assert found.min_tokens("x" * 100_000) > 100
    assert found.min_tokens("A" * 100_000) == 0
    assert found.min_tokens("Ax" * 100_000) >= found.min_tokens("x" * 100_000) - 1


@pytest.mark.parametrize("what", ["lstrip", "lowercase", "strip", "replace", "whitespace", "no byte and a normalizer"])
def test_no_bound_where_text_may_be_dropped(what: str) -> None:
    backend = byte_tokenizer()
    assert Tokenizer(backend).min_tokens("x" * 100_000) > 0
    if what == "lstrip":
        backend.add_special_tokens([AddedToken("<x>", lstrip=True)])
    elif what == "whitespace":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    elif what == "no byte and a normalizer":
        backend = without(backend, "A")
        backend.normalizer = normalizers.NFC()
    else:
        made: dict[str, Any] = {"lowercase": normalizers.Lowercase(), "strip": normalizers.Strip(), "replace": normalizers.Replace(" ", "")}
        backend.normalizer = made[what]
    assert Tokenizer(backend).min_tokens("x" * 100_000) == 0


def test_row_32_a_hopeless_text_is_refused_without_tokenizing_it() -> None:
    class Counting(ByteTokens):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            raise AssertionError("tokenized")

        def min_tokens(self, text: str) -> int:
            return len(text)

    manager = TokenizerManager(lambda _: None, RuntimeConfig())
    manager.attach_model(Counting([b"a"]), chat_template=None, served_names=("m",), sampling_defaults={})
    manager.handle(SchedulerReady(num_pages=5, page_size=16, max_rows=2, max_context_len=100, max_prompt_len=90, vocab_size=1))

    async def first(num_chars: int) -> None:
        async for _ in manager.generate(GenerateReq(prompt="x" * num_chars, param="prompt")):
            pass

    with pytest.raises(ContextOverflow, match=r"100 tokens.*at least 100 input") as caught:
        asyncio.run(first(100))
    assert caught.value.prompt_len == 100
    with pytest.raises(PoolOverflow, match="at least 99 input"):
        asyncio.run(first(99))
    assert manager.num_open == 0


BAD: dict[str, Any] = {
    "no type": {"model": {}},
    "unknown type": {"model": {"type": "X"}},
    "null": {"model": None},
    "merge out of vocabulary": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
    "bad decoder": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "Nothing"}},
    "bad pattern": {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    },
    "missing piece of the post-processor": {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": [], "special_tokens": {}},
    },
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_damaged_tokenizer_json_is_a_bad_model_file(tmp_path: Path, name: str) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    document = {"version": "1.0", "added_tokens": [], **BAD[name]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
