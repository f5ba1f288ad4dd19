"""Text <-> token ids, for tokenizer.json and for the vocabulary in a GGUF file alike.

Owns the true bytes of each token (what detokenising and byte-level stop matching build on) and when BOS is added. Does not render chats
(`frontend.chat_template`) nor make text incrementally (`frontend.detokenize`). The text of a special token inside a prompt becomes that
token, as in Hugging Face's `encode`. Safe to share between threads: nothing changes after construction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import tokenizers

from rootlet.core.errors import BadModelFile, InvalidValue
from rootlet.formats.hf import read_json, read_optional_json, token_text
from rootlet.formats.weights import is_gguf_model
from rootlet.frontend.tokenizer_gguf import build_from_gguf

NFC_SHRINK = 4  # the longest canonical decomposition of one character (U+1F82 and its like)
_BYTE_PIECE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet backwards: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Tokenizer:
    """A `tokenizers.Tokenizer` with what serving needs beside it. Ids are ints in [0, vocab_size)."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int = 0,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool | None = None,
        add_eos: bool = False,
    ) -> None:
        """`vocab_size` = the model's padded one. `add_bos` None = the backend's own post-processor decides about BOS and EOS."""
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        decoder = _state(backend.decoder)
        self._byte_level = "ByteLevel" in _types(decoder)
        self._own_specials = add_bos is not None
        self._prefix = [bos_token_id] if add_bos and bos_token_id is not None else []
        self._suffix = [eos_token_id] if self._own_specials and add_eos and eos_token_id is not None else []
        self.vocab_size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.add_bos = bool(self._prefix) if self._own_specials else bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self.left_context_dependent = _strips_first_space(decoder)
        known = self._backend.get_vocab(with_added_tokens=False) if self._byte_level else _ALPHABET
        self._missing_bytes = bytes(byte for char, byte in _ALPHABET.items() if char not in known)
        self._max_token_bytes = self._widest_token()

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at the least, from its length alone: 0 where nothing can be said. O(characters), some ns each."""
        if not self._max_token_bytes:
            return 0
        num_dropped = 0
        if self._missing_bytes:  # a character is lost with any of its bytes
            raw = text.encode("utf-8", "replace")
            num_dropped = len(raw) - len(raw.translate(None, self._missing_bytes))
        return max(0, len(text) - num_dropped) // self._max_token_bytes

    def _widest_token(self) -> int:
        """Characters of a text that one token can stand for at the most; 0 = no bound is known, since text may be dropped or merged into one unknown
        token. A token of k characters or bytes stands for k characters at the most."""
        vocab = self._backend.get_vocab(with_added_tokens=False)
        normalizer = _state(self._backend.normalizer)
        covered = not (self._missing_bytes and normalizer) if self._byte_level else getattr(self._backend.model, "byte_fallback", False)
        drops = any(token.lstrip or token.rstrip for token in self._added.values()) or _may_drop(_state(self._backend.pre_tokenizer))
        if drops or not covered:
            return 0
        return _shrink(normalizer) * max(map(len, [*vocab, *(token.content for token in self._added.values())]), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with BOS (and EOS) as the model wants if `add_special_tokens`. Raises: InvalidValue for lone surrogates."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text; drops the GIL. Raises: InvalidValue for lone surrogates."""
        for text in texts:
            if not text.isascii():
                _check_unicode(text)
        by_backend = add_special_tokens and not self._own_specials
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=by_backend)
        if add_special_tokens and self._own_specials:
            return [[*self._prefix, *e.ids, *self._suffix] for e in encodings]
        return [e.ids for e in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD; ids that name no token give nothing."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for, before any stripping of a first space; special tokens give their text; b"" for padding ids."""
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        piece = self.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            values = [_ALPHABET.get(char) for char in piece]
            return piece.encode() if None in values else bytes(v for v in values if v is not None)
        match = _BYTE_PIECE.match(piece)
        return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for padding ids."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary; None if there is none."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a control token, left out by `decode(skip_special_tokens=True)`."""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the model at `path`: tokenizer.json of a folder, or built from GGUF metadata.

    Raises: BadModelFile naming what is missing or not served. Logs a warning if a GGUF file's pre-tokenizer name is missing or unknown.
    """
    if is_gguf_model(path):
        parts = build_from_gguf(path)
        return Tokenizer(
            parts.backend,
            vocab_size=parts.vocab_size,
            bos_token_id=parts.bos_token_id,
            eos_token_id=parts.eos_token_id,
            add_bos=parts.add_bos,
            add_eos=parts.add_eos,
        )
    return _from_folder(path if path.is_dir() else path.parent)


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise BadModelFile(f"{folder.name}: no tokenizer.json; a tokenizer.model alone is not read: save the tokenizer in its fast form.")
    if "model" not in read_json(file):
        raise BadModelFile("tokenizer.json: no model in it; expected a file of the tokenizers library.")
    with _blaming(file):
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")  # some damage shows only here
    settings = read_optional_json(folder, "tokenizer_config.json")
    config = read_optional_json(folder, "config.json")
    vocab_size = config.get("vocab_size")
    ids = {key: _special_id(backend, settings, config, key) for key in ("bos", "eos")}
    # The post-processor in tokenizer.json decides about BOS, as in transformers 5: add_bos_token of tokenizer_config is not consulted there.
    return Tokenizer(backend, vocab_size=vocab_size if isinstance(vocab_size, int) else 0, bos_token_id=ids["bos"], eos_token_id=ids["eos"])


@contextmanager
def _blaming(file: Path) -> Iterator[None]:
    """The library names every kind of damage by an exception of no class of its own (or by a panic): those, and only those, become BadModelFile."""
    try:
        yield
    finally:
        kind, error, _ = sys.exc_info()
        if error is not None and (kind is Exception or type(error).__name__ == "PanicException"):
            raise BadModelFile(f"{file.name}: the tokenizers library cannot read it ({str(error)[:300]}).") from error


def _special_id(backend: tokenizers.Tokenizer, settings: dict[str, Any], config: dict[str, Any], key: str) -> int | None:
    """tokenizer_config decides where it speaks (null = none); else config.json's id (the first of a list)."""
    if f"{key}_token" in settings:
        text = token_text(settings[f"{key}_token"])
        return None if text is None else backend.token_to_id(text)
    value = config.get(f"{key}_token_id")
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, int) else None


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("prompt", f"The text holds a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}.") from error


def _state(component: Any) -> dict[str, Any]:
    """The JSON of one part of a tokenizer, without serialising its vocabulary."""
    if component is None:
        return {}
    found = orjson.loads(component.__getstate__())
    return found if isinstance(found, dict) else {}


def _may_drop(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether splitting may lose characters; unknown kinds may."""
    steps = pre_tokenizer.get("pretokenizers", []) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer] if pre_tokenizer else []
    kept = {"ByteLevel", "Digits", "Split", "Metaspace", "Punctuation"}
    return any(step.get("type") not in kept or step.get("behavior") == "Removed" for step in steps)


def _shrink(normalizer: dict[str, Any]) -> int:
    """How many characters of input may become one of the normalizer's output; 0 for one that may drop text."""
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer] if normalizer else []
    kinds = {str(step.get("type")) for step in steps}
    blank = all(step.get("pattern") == {"String": " "} and step.get("content") == "▁" for step in steps if step.get("type") == "Replace")
    if kinds - {"NFC", "Prepend", "Replace"} or not blank:
        return 0
    return NFC_SHRINK if "NFC" in kinds else 1


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _types(decoder: dict[str, Any]) -> set[str]:
    return {str(step.get("type")) for step in _steps(decoder)}


def _strips_first_space(decoder: dict[str, Any]) -> bool:
    """Whether decoding drops a space at the very start, so that a token's text depends on what stands to its left."""
    for step in _steps(decoder):
        if step.get("type") == "Strip" and step.get("start", 0) > 0:
            return True
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False
