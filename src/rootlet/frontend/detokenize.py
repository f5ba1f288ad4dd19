"""Token ids to text, piece by piece: bytes of each token through an incremental UTF-8 decoder.

Decoding bytes, not strings, makes the stream exact by construction: the concatenation of all pieces is the decoding of all bytes, and
U+FFFD appears only where bytes can no longer become a character. No re-decoding of a window, no comparing of prefixes.
Owns no request table (see `detokenizer_manager`).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_decoder_of_utf8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What detokenising must know of a tokenizer.

    `token_bytes(i)` = the bytes that token i adds when it is not the first of a text; b"" for ids without text. `left_context_dependent` =
    the first piece of a text loses one leading space (SentencePiece adds one in front of every text).
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def left_context_dependent(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class VisibleBytes(dict[int, bytes]):
    """Token id -> the bytes that it shows: b"" for what is hidden. Filled as ids come by; at most the vocabulary."""

    __slots__ = ("_skip_special_tokens", "_tokens")

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokens = tokens
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        # Padding rows of the embedding matrix have an id but no text.
        if not 0 <= token_id < self._tokens.vocab_size:
            return b""
        hidden = self._skip_special_tokens and self._tokens.is_special(token_id)
        data = self[token_id] = b"" if hidden else self._tokens.token_bytes(token_id)
        return data

    def hides(self, token_id: int) -> bool:
        """True for an id that can have no text, however it is spelled."""
        return not 0 <= token_id < self._tokens.vocab_size or (self._skip_special_tokens and self._tokens.is_special(token_id))


class IncrementalDetokenizer:
    """Text of one growing token sequence. `num_chars` counts characters given out so far.

    `prompt_tail`: ids left of the first token; while it holds no token with visible text, the sequence stands at the start of a text.
    `visible`: shared between sequences of one tokenizer and one `skip_special_tokens`; None = one of its own.
    """

    __slots__ = ("_at_text_start", "_begun", "_decoder", "_visible", "num_chars")

    def __init__(
        self, tokens: TokenBytes, *, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = (), visible: VisibleBytes | None = None
    ) -> None:
        self._visible = VisibleBytes(tokens, skip_special_tokens=skip_special_tokens) if visible is None else visible
        self._decoder = _decoder_of_utf8("replace")
        self._begun = False  # a character is half done
        self._at_text_start = tokens.left_context_dependent and all(self._visible.hides(i) for i in prompt_tail)
        self.num_chars = 0

    def push(self, token_id: int) -> tuple[str, int]:
        """Feed one token; returns (text that became certain, index of the first character that this token helps to spell)."""
        data = self._visible[token_id]
        if self._at_text_start and data:
            self._at_text_start = False
            data = data.removeprefix(b" ")
        start = self.num_chars
        if not self._begun and data.isascii():  # most tokens; the decoder has nothing to remember
            self.num_chars += len(data)
            return data.decode("ascii"), start
        # A lead byte (not 10xxxxxx) ends a half-done character, which becomes U+FFFD in front of this token's own text.
        cuts_off = self._begun and bool(data) and data[0] & 0xC0 != 0x80
        text = self._count(self._decoder.decode(data))
        self._begun = bool(self._decoder.getstate()[0])
        return text, start + (1 if cuts_off else 0)

    def finish(self) -> str:
        """The rest: U+FFFD if the sequence ends inside a character, else "". The object is done afterwards."""
        return self._count(self._decoder.decode(b"", True))

    def _count(self, text: str) -> str:
        self.num_chars += len(text)
        return text


def detokenize(tokens: TokenBytes, token_ids: Sequence[int], *, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = ()) -> str:
    """Text of a whole sequence; equals the concatenation of the pieces of `IncrementalDetokenizer`."""
    state = IncrementalDetokenizer(tokens, skip_special_tokens=skip_special_tokens, prompt_tail=prompt_tail)
    return "".join([state.push(i)[0] for i in token_ids]) + state.finish()
