"""Incremental detokenising: what is shown when, and the leading space. The general law is in tests/property."""

from __future__ import annotations

import pytest

from fixtures.fake_tokens import ByteTokens, all_bytes
from rootlet.frontend.detokenize import IncrementalDetokenizer, VisibleBytes, detokenize

BYTES = all_bytes()


def _pieces(data: bytes) -> list[str]:
    state = IncrementalDetokenizer(BYTES)
    return [state.push(b)[0] for b in data] + [state.finish()]


def test_row_01_no_replacement_character_while_a_character_can_still_complete() -> None:
    assert _pieces("é🚀".encode()) == ["", "é", "", "", "", "🚀", ""]


def test_row_01_a_cut_inside_a_character_is_the_same_streamed_and_whole() -> None:
    data = "我很好🧑‍🚀🏳️‍🌈é́ไทย가".encode()
    for cut in range(len(data) + 1):
        assert "".join(_pieces(data[:cut])) == data[:cut].decode("utf-8", "replace")


def test_row_03_invalid_bytes_become_replacement_characters_only() -> None:
    data = b"a\xff\xc3b\xe2\x82\xf0\x9f\x98"
    assert "".join(_pieces(data)) == data.decode("utf-8", "replace")


def test_special_tokens_are_skipped_or_spelled() -> None:
    tokens = ByteTokens([b"a", b"<eos>", "é".encode()[:1], "é".encode()[1:]], specials=[1])
    assert detokenize(tokens, [0, 1, 2, 1, 3]) == "aé"
    assert detokenize(tokens, [0, 1], skip_special_tokens=False) == "a<eos>"


@pytest.mark.parametrize(
    ("tail", "text"),
    [((), "Hello world"), ((2,), "Hello world"), ((1,), " Hello world"), ((1, 2), " Hello world")],
    ids=["no prompt", "special only", "ordinary", "ordinary then special"],
)
def test_the_first_space_goes_only_at_the_start_of_a_text(tail: tuple[int, ...], text: str) -> None:
    tokens = ByteTokens([b" Hello", b" world", b"<s>"], specials=[2], left_context_dependent=True)
    assert detokenize(tokens, [0, 1], prompt_tail=tail) == text


def test_a_visible_special_token_is_a_left_neighbour_too() -> None:
    tokens = ByteTokens([b" Hello", b" world", b"<s>"], specials=[2], left_context_dependent=True)
    assert detokenize(tokens, [2, 0], skip_special_tokens=False) == "<s> Hello"
    assert detokenize(tokens, [2, 0]) == "Hello"
    assert detokenize(tokens, [0], skip_special_tokens=False, prompt_tail=[2]) == " Hello"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert detokenize(ByteTokens([b"a"]), [0, 7, -1, 0]) == "aa"


def test_the_start_of_a_token_counts_a_character_that_it_cuts_off() -> None:
    state = IncrementalDetokenizer(BYTES)
    starts = [state.push(b)[1] for b in b"a\xe2b"]
    assert starts == [0, 1, 2]  # "a", then the half character that becomes U+FFFD, then "b" behind it


def test_what_a_token_shows_is_asked_once_and_ids_without_text_are_not_kept() -> None:
    tokens = ByteTokens([b"a", b"<s>"], specials=[1])
    visible = VisibleBytes(tokens, skip_special_tokens=True)
    assert [visible[i] for i in (0, 1, 0, 2, -1, 10**9)] == [b"a", b"", b"a", b"", b"", b""]
    assert sorted(visible) == [0, 1]
    assert VisibleBytes(tokens, skip_special_tokens=False)[1] == b"<s>"
