"""What is typed into `rootlet chat` and is no text."""

from __future__ import annotations

from collections.abc import Generator

from rootlet.cli.chat import converse
from rootlet.cli.chat_http import Messages


def test_a_byte_that_is_no_text_does_not_end_the_conversation() -> None:
    asked: list[list[str]] = []
    typed = iter(["a\udcffb", "next", "/quit"])

    def answer(messages: Messages) -> Generator[str, None, None]:
        asked.append([message["content"].encode().decode() for message in messages])  # what no UTF-8 can hold raises
        yield "ok"

    converse(answer, None, lambda: next(typed))
    assert asked == [["a?b"], ["a?b", "ok", "next"]]
