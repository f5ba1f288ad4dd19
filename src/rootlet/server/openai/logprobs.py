"""Log-probabilities in the two OpenAI shapes, aligned with the text that a client sees.

Rules: the concatenated `token` strings are the text, whatever the chunking; a character that spans tokens is given by the token that completes it
("" before); `bytes` are the token's true bytes; a token that the text does not show (a skipped special token) is ""; -inf is -9999.0.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from rootlet.core.types import TokenLogprob
from rootlet.server.door import Tokenizer
from rootlet.server.token_json import alone, finite


class TokenTexts:
    """The text of each token in its place: an incremental UTF-8 decoder over the bytes that are visible. One per choice."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._visible: dict[int, bytes] = {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def visible(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text."""
        raw = self._visible.get(token_id)
        if raw is None:
            hidden = self._skip and is_special(self._tokenizer, token_id)
            raw = self._visible[token_id] = b"" if hidden else self._tokenizer.token_bytes(token_id)
        return raw

    def take(self, entries: Sequence[TokenLogprob], *, final: bool) -> list[str]:
        """What each token adds to the characters so far. `final`: U+FFFD for bytes that never became a character, on the last token."""
        texts = [self._decoder.decode(self.visible(entry.token_id)) for entry in entries]
        tail = self._decoder.decode(b"", True) if final else ""
        if tail and texts:
            texts[-1] += tail
        return texts


def is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether decoding leaves this token out when special tokens are skipped."""
    return not tokenizer.decode([token_id], skip_special_tokens=True) and bool(tokenizer.decode([token_id], skip_special_tokens=False))


class Aligner:
    """Holds logprobs back until the text that they belong to is released, and drops those whose text a stop cut away. One per choice.

    An entry goes out with the first text that its first byte is in; one without visible bytes (a skipped special token, the EOS that ended the
    choice) goes with its predecessor or at the end, so that there are as many entries as tokens unless a stop string cut some away.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._texts = TokenTexts(tokenizer, skip_special_tokens=skip_special_tokens)
        self._pending: list[TokenLogprob] = []
        self._start = 0
        self._released = 0

    def push(self, entries: Sequence[TokenLogprob], text: str, *, finished: bool, matched: str | int | None = None) -> list[TokenLogprob]:
        """The entries that go with `text`. At the end (`finished`) all that are left, but for what lies behind a stop."""
        self._pending.extend(entries)
        self._released += len(text.encode("utf-8", "replace"))
        ready: list[TokenLogprob] = []
        for entry in self._pending:
            size = len(self._texts.visible(entry.token_id))
            if self._start >= self._released and (size or not ready):
                break
            ready.append(entry)
            self._start += size
        del self._pending[: len(ready)]
        if finished:
            if not isinstance(matched, str):
                ready.extend(self._pending)
            self._pending = []
        return ready


def chat_entries(tokenizer: Tokenizer, texts: TokenTexts, entries: Sequence[TokenLogprob], top_n: int, *, final: bool) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one object a token. `final` = no more will come: broken bytes at the end become U+FFFD, as in the text."""
    result = []
    for entry, text in zip(entries, texts.take(entries, final=final), strict=True):
        raw = texts.visible(entry.token_id)
        top = [
            {"token": alone(tokenizer, i), "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(i))}
            for i, logprob in zip(entry.top_ids[:top_n], entry.top_logprobs[:top_n], strict=True)
        ]
        result.append({"token": text, "logprob": finite(entry.logprob), "bytes": list(raw), "top_logprobs": top})
    return result


class CompletionLogprobs:
    """The legacy shape of `/v1/completions`, continuing across chunks. One per choice; `offset` = characters of the choice's text so far."""

    def __init__(self, tokenizer: Tokenizer, *, top_n: int, skip_special_tokens: bool, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._top_n = top_n
        self._as_ids = as_ids
        self.texts = TokenTexts(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def prompt(self, entries: Sequence[TokenLogprob], text: str) -> dict[str, Any]:
        """The echoed prompt. Tokens that the tokenizer added and `text` does not show are ""; the first logprob is null."""
        shown = prompt_texts(self._tokenizer, [entry.token_id for entry in entries], text)
        return self._render(entries, shown)

    def delta(self, entries: Sequence[TokenLogprob], *, final: bool) -> dict[str, Any]:
        return self._render(entries, self.texts.take(entries, final=final))

    def _render(self, entries: Sequence[TokenLogprob], shown: Sequence[str]) -> dict[str, Any]:
        tokens, offsets, tops = [], [], []
        for entry, text in zip(entries, shown, strict=True):
            name = f"token_id:{entry.token_id}" if self._as_ids else text
            tokens.append(name)
            offsets.append(self._offset)
            tops.append(self._top(entry, name))
            self._offset += len(text)
        logprobs = [finite(entry.logprob) for entry in entries]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops if self._top_n else None, "text_offset": offsets}

    def _top(self, entry: TokenLogprob, name: str) -> dict[str, float | None] | None:
        if entry.logprob is None:
            return None
        top: dict[str, float | None] = {}
        if entry.token_id not in entry.top_ids[: self._top_n]:
            top[name] = finite(entry.logprob)
        for i, logprob in zip(entry.top_ids[: self._top_n], entry.top_logprobs[: self._top_n], strict=True):
            key = name if i == entry.token_id else f"token_id:{i}" if self._as_ids else alone(self._tokenizer, i)
            if key in top or (key == name and i != entry.token_id):
                key = f"token_id:{i}"  # two tokens with one text: both are kept
            top[key] = finite(logprob)
        return top


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates the lists of completion logprobs; `top_logprobs` stays null when no alternatives were asked for."""
    result: dict[str, Any] = {}
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        lists = [part[key] for part in parts]
        result[key] = None if any(item is None for item in lists) else [entry for item in lists for entry in item]
    return result


def prompt_texts(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[str]:
    """Each prompt token's share of `text`, so that they concatenate to it: added specials are "", a space the tokenizer put first is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown: list[str] = []
    position = 0
    for token_id in ids:
        raw = tokenizer.token_bytes(token_id)
        part = decoder.decode(raw)
        if part and not text.startswith(part, position):
            if is_special(tokenizer, token_id):
                part = ""
            elif position == 0 and part.startswith(" ") and text.startswith(part[1:]):
                part = part[1:]
        shown.append(part)
        position += len(part)
    tail = decoder.decode(b"", True)
    if tail and shown:
        shown[-1] += tail
    return shown


def prompt_logprobs_json(tokenizer: Tokenizer, entries: Sequence[TokenLogprob] | None, top_n: int) -> list[dict[str, Any] | None] | None:
    """The `prompt_logprobs` extension: for each prompt token null (the first) or `{token id: {logprob, rank, decoded_token}}`."""
    if entries is None:
        return None
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry.logprob is None:
            result.append(None)
            continue
        ranked = zip(entry.top_ids[:top_n], entry.top_logprobs[:top_n], strict=True)
        item = {str(i): {"logprob": finite(p), "rank": rank, "decoded_token": alone(tokenizer, i)} for rank, (i, p) in enumerate(ranked, 1)}
        own = {"logprob": finite(entry.logprob), "rank": None, "decoded_token": alone(tokenizer, entry.token_id)}
        item.setdefault(str(entry.token_id), own)
        result.append(item)
    return result
