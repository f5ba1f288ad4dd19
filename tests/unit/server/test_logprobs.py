"""Alignment of logprobs with released text, whatever the chunking; names of tokens that are no whole characters."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.fake_manager import EOS, ByteTokenizer, logprob
from rootlet.core.types import LOGPROB_FLOOR, TokenLogprob
from rootlet.server.openai.logprobs import Aligner, CompletionLogprobs, TokenTexts, join, prompt_texts
from rootlet.server.token_json import alone, finite

TOKENIZER = ByteTokenizer()


@given(st.text(max_size=30), st.lists(st.integers(0, 120), max_size=6), st.lists(st.integers(0, 40), max_size=6))
def test_any_chunking_and_holdback_gives_the_same_entries(text: str, id_cuts: list[int], text_cuts: list[int]) -> None:
    raw = text.encode("utf-8", "replace")
    text = raw.decode()
    steps = sorted({0, len(raw), *(min(c, len(raw)) for c in id_cuts)})
    # Text may lag behind its tokens (it is held back), never run ahead of them.
    aligner = Aligner(TOKENIZER, skip_special_tokens=True)
    texts = TokenTexts(TOKENIZER, skip_special_tokens=True)
    out: list[TokenLogprob] = []
    tokens: list[str] = []
    released = 0
    for number, (a, b) in enumerate(pairwise([*steps, len(raw)])):
        whole = len(raw[:b].decode("utf-8", "ignore"))
        final = b == len(raw) and number == len(steps) - 1
        target = len(text) if final else max(released, whole - (text_cuts[number] if number < len(text_cuts) else 0))
        entries = [logprob(i, -1.0, 0) for i in raw[a:b]]
        got = aligner.push(entries, text[released:target], finished=final)
        released = target
        out += got
        tokens += texts.take(got, final=final)
    assert [e.token_id for e in out] == list(raw)
    assert "".join(tokens) == text


def test_entries_wait_for_their_text() -> None:
    aligner = Aligner(TOKENIZER, skip_special_tokens=True)
    ab = [logprob(i, -1.0, 0) for i in b"ab"]
    assert aligner.push(ab, "", finished=False) == []
    assert aligner.push([], "a", finished=False) == ab[:1]
    assert aligner.push([], "b", finished=False) == ab[1:]
    assert aligner.push([logprob(EOS, -1.0, 0)], "", finished=True, matched=EOS) == [logprob(EOS, -1.0, 0)]


def test_fragments_are_named_by_their_bytes_and_twins_by_their_id() -> None:
    assert alone(TOKENIZER, 0xE9) == "bytes:\\xe9"
    assert alone(TOKENIZER, 65) == "A"
    render = CompletionLogprobs(TOKENIZER, top_n=3, skip_special_tokens=True, as_ids=False)
    # The sampled fragment adds nothing yet and is called ""; an alternative that spells the same is called by its id.
    entry = TokenLogprob(0xC3, -1.0, (0xC3, 0xA9, 65), (-1.0, -2.0, -3.0))
    assert render.delta([entry], final=False)["top_logprobs"] == [{"": -1.0, "bytes:\\xa9": -2.0, "A": -3.0}]
    completed = TokenLogprob(0xA9, -1.0, (65,), (-0.1,))
    part = render.delta([completed], final=True)
    assert part["tokens"] == ["é"]
    assert part["top_logprobs"] == [{"é": -1.0, "A": -0.1}]
    assert part["text_offset"] == [0]


def test_a_cut_inside_a_character_is_one_replacement_in_tokens_as_in_text() -> None:
    texts = TokenTexts(TOKENIZER, skip_special_tokens=True)
    assert texts.take([logprob(i, -1.0, 0) for i in b"a\xe6\x88"], final=True) == ["a", "", "\ufffd"]


@pytest.mark.parametrize(("value", "expected"), [
    (None, None), (-1.5, -1.5), (-math.inf, LOGPROB_FLOOR), (math.nan, LOGPROB_FLOOR), (-1e30, LOGPROB_FLOOR), (math.inf, 0.0), (0.0, 0.0),
])  # fmt: skip
def test_values_are_json(value: float | None, expected: float | None) -> None:
    assert finite(value) == expected


def test_prompt_tokens_that_the_text_does_not_show_are_empty() -> None:
    assert prompt_texts(TOKENIZER, [257, 104, 105], "hi") == ["", "h", "i"]
    assert prompt_texts(TOKENIZER, [32, 104], "h") == ["", "h"]
    assert prompt_texts(TOKENIZER, [257, 104], "<bos>h") == ["<bos>", "h"]


def test_joining_keeps_null_alternatives() -> None:
    part = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [0]}
    assert join([part, part]) == {"tokens": ["a", "a"], "token_logprobs": [-1.0, -1.0], "top_logprobs": None, "text_offset": [0, 0]}
