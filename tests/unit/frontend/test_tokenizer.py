"""Tokenizers from tokenizer.json and from GGUF: ids equal transformers', bytes are true, BOS once, unknown splitting is loud."""

import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from fixtures.tiny_tokenizers import HF_PRE, SPM_PIECES, add_byte_bpe, add_spm, byte_tokenizer, save_tokenizer, torture_strings, train_byte_bpe
from rootlet.core.errors import BadModelFile, InvalidValue
from rootlet.frontend.chat_template import load_chat_template
from rootlet.frontend.tokenizer import Tokenizer, load_tokenizer


def gguf_with(path: Path, add: Any) -> Path:
    import numpy as np

    writer = GGUFWriter(path, "llama")
    add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((600, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_bpe_gguf(path: Path, backend: Backend, pre: str | None, *, add_bos: bool = False) -> Path:
    return gguf_with(path, lambda writer: add_byte_bpe(writer, backend, pre=pre, rows=600, add_bos=add_bos))


@pytest.fixture(scope="module")
def trained() -> dict[str, Backend]:
    return {pre: train_byte_bpe(pre) for pre in HF_PRE}


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(gguf_with(tmp_path_factory.mktemp("spm") / "spm.gguf", add_spm))


@pytest.mark.parametrize("pre", HF_PRE)
def test_row_70_ids_equal_transformers_for_torture_strings(trained: dict[str, Backend], tmp_path: Path, pre: str) -> None:
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(trained[pre], tmp_path / "hf")
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    from_gguf = load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", trained[pre], pre))
    from_json = load_tokenizer(tmp_path / "hf")
    strings = torture_strings()
    assert len(strings) == 300
    for text in strings:
        expected = reference.encode(text)
        assert from_gguf.encode(text) == expected, repr(text)
        assert from_json.encode(text) == expected, repr(text)
        assert from_gguf.decode(expected, skip_special_tokens=False) == reference.decode(expected, clean_up_tokenization_spaces=False)
    assert from_gguf.encode_batch(strings) == [reference.encode(text) for text in strings]


def test_row_70_splitting_matters(trained: dict[str, Backend], tmp_path: Path) -> None:
    right = load_tokenizer(byte_bpe_gguf(tmp_path / "a.gguf", trained["llama-bpe"], "llama-bpe"))
    wrong = load_tokenizer(byte_bpe_gguf(tmp_path / "b.gguf", trained["llama-bpe"], "smollm"))
    assert any(right.encode(text) != wrong.encode(text) for text in torture_strings())


@pytest.mark.parametrize(("pre", "shown"), [(None, "name=missing"), ("made-up", "name=made-up")])
def test_row_70_unknown_or_missing_name_is_loud(
    trained: dict[str, Backend], tmp_path: Path, caplog: pytest.LogCaptureFixture, pre: str | None, shown: str
) -> None:
    with caplog.at_level(logging.WARNING):
        found = load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", trained["gpt-2"], pre))
    assert shown in caplog.text
    assert found.encode("it's 2024") == trained["gpt-2"].encode("it's 2024").ids


def test_row_70_special_text_from_users_becomes_the_token(trained: dict[str, Backend], tmp_path: Path) -> None:
    found = load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", trained["smollm"], "smollm"))
    (end,) = found.encode("<|im_end|>")
    (think,) = found.encode("<think>")
    assert (found.is_special(end), found.is_special(think)) == (True, False)
    assert (found.token_bytes(end), found.token_bytes(think)) == (b"<|im_end|>", b"<think>")
    assert found.decode([end, think]) == "<think>"


@pytest.mark.parametrize("pre", ["smollm", "tekken"])
def test_bytes_of_tokens_make_the_text(trained: dict[str, Backend], tmp_path: Path, pre: str) -> None:
    found = load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", trained[pre], pre))
    for text in torture_strings():
        assert b"".join(map(found.token_bytes, found.encode(text))) == text.encode()


def test_every_byte_has_a_token(tmp_path: Path) -> None:
    found = load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", byte_tokenizer(), "gpt-2"))
    assert {found.token_bytes(i) for i in range(256)} == {bytes([b]) for b in range(256)}


def test_padding_ids(tmp_path: Path) -> None:
    save_tokenizer(byte_tokenizer(), tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    found = load_tokenizer(tmp_path)
    assert (found.vocab_size, found.id_to_token(299), found.token_bytes(299), found.is_special(299)) == (300, None, b"", False)
    assert found.decode([*found.encode("ab"), 299, 10**9, -1]) == "ab"


def merge_by_score(text: str) -> list[int]:
    """SentencePiece's rule, written naively: merge the neighbours whose joint piece scores best, leftmost first; bytes for what is left."""
    pieces = {piece: (i, score, kind) for i, (piece, score, kind) in enumerate(SPM_PIECES)}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        options = [(pieces[a + b][1], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if pieces.get(a + b, (0, 0, 0))[2] == 1]
        if not options:
            break
        at = -max(options)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [pieces[symbol][0]] if symbol in pieces else [3 + byte for byte in symbol.encode()]
    return ids


def test_row_70_spm_equals_a_naive_merge_by_score(spm: Tokenizer) -> None:
    for text in [t for t in torture_strings() if "<" not in t]:
        assert spm.encode(text, add_special_tokens=False) == merge_by_score(text), repr(text)


def test_spm_bos_specials_and_bytes(spm: Tokenizer) -> None:
    ids = spm.encode("hello 😀")
    assert (ids[0], spm.add_bos, spm.bos_token_id, spm.eos_token_id) == (1, True, 1, 2)
    assert b"".join(map(spm.token_bytes, ids[1:])) == b" hello " + "😀".encode()
    assert spm.decode(ids) == "hello 😀"
    assert spm.left_context_dependent
    tool = len(SPM_PIECES) - 1
    assert tool in spm.encode("x<tool>y")
    assert not spm.is_special(tool)
    assert spm.is_special(2)


def test_byte_level_is_not_left_context_dependent(trained: dict[str, Backend], tmp_path: Path) -> None:
    assert not load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", trained["gpt-2"], "gpt-2")).left_context_dependent


@pytest.mark.parametrize("add_bos", [False, True])
def test_row_14_gguf_adds_bos_as_the_flag_says(trained: dict[str, Backend], tmp_path: Path, add_bos: bool) -> None:
    found = load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", trained["gpt-2"], "gpt-2", add_bos=add_bos))
    assert found.encode("a").count(found.bos_token_id or -1) == int(add_bos)
    assert found.bos_token_id not in found.encode("a", add_special_tokens=False)
    assert found.add_bos == add_bos


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}, {"bos_token": None}])
@pytest.mark.parametrize("post_processor", [False, True])
def test_row_14_folder_equals_transformers(tmp_path: Path, settings: dict[str, Any], post_processor: bool) -> None:
    from transformers import AutoTokenizer

    backend = byte_tokenizer()
    if post_processor:
        bos = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
        backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[bos])
    save_tokenizer(backend, tmp_path, settings=settings)
    reference, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours.encode("hi there") == reference.encode("hi there")
    assert ours.encode("hi there", add_special_tokens=False) == reference.encode("hi there", add_special_tokens=False)
    assert ours.add_bos == (reference.encode("x")[0] == reference.bos_token_id)


@pytest.mark.parametrize("half", [b"\xed\xa0\x80", b"\xed\xbf\xbf"])
def test_surrogates_in_a_gguf_vocabulary_and_template_become_replacement_characters(half: bytes, tmp_path: Path) -> None:
    """GGUF spells text in bytes: half a pair is no UTF-8 there, and never reaches a string that the rest would choke on."""

    def add(writer: GGUFWriter) -> None:
        add_byte_bpe(writer, byte_tokenizer(), pre="gpt-2", rows=600)
        writer.add_chat_template("???{{ messages[0]['content'] }}")

    path = gguf_with(tmp_path / "t.gguf", add)
    raw = path.read_bytes()
    assert min(raw.count(text) for text in (b"<|im_end|>", b"[PAD300]", b"???")) == 1
    path.write_bytes(raw.replace(b"<|i", half).replace(b"[PA", half).replace(b"???", half))
    found = load_tokenizer(path)
    assert found.decode(found.encode("hello"), skip_special_tokens=False) == "hello"
    for i in range(found.vocab_size):
        found.decode([i], skip_special_tokens=False).encode()
        found.token_bytes(i)
    assert "\ufffd" in str(found.id_to_token(found.eos_token_id or 0))
    text = load_chat_template(path).render([{"role": "user", "content": "hi"}])
    assert (text[:1], text[-2:]) == ("\ufffd", "hi")
    found.encode(text)


def test_lone_surrogate_is_the_clients_fault(spm: Tokenizer) -> None:
    with pytest.raises(InvalidValue, match=r"lone surrogate \(U\+D800\) at position 1"):
        spm.encode("a\ud800")


def test_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    def broken_merge(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])

    with pytest.raises(BadModelFile, match="merge 'a b' names a token"):
        load_tokenizer(gguf_with(tmp_path / "a.gguf", broken_merge))
    with pytest.raises(BadModelFile, match="tokenizer model 't5' is not served"):
        load_tokenizer(gguf_with(tmp_path / "b.gguf", lambda w: (w.add_tokenizer_model("t5"), w.add_token_list(["a"]))))
    with pytest.raises(BadModelFile, match="no vocabulary"):
        load_tokenizer(gguf_with(tmp_path / "c.gguf", lambda w: None))
    (tmp_path / "hf").mkdir()
    with pytest.raises(BadModelFile, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "hf")


def test_threads_share_one_tokenizer(trained: dict[str, Backend], tmp_path: Path) -> None:
    found = load_tokenizer(byte_bpe_gguf(tmp_path / "t.gguf", trained["smollm"], "smollm"))
    texts = torture_strings()
    expected, wrong = found.encode_batch(texts), []

    def work() -> None:
        wrong.extend(text for text, ids in zip(texts, expected, strict=True) if found.encode(text) != ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
