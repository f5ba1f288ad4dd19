"""How a byte-level BPE splits text before merging: the GGUF name `tokenizer.ggml.pre` -> a `tokenizers` pre-tokenizer.

Owns the table of names. The patterns are facts of the models' own tokenizer.json files; a wrong one silently lowers a model's quality,
so an unknown name falls back to GPT-2 splitting with a warning. Called by `frontend.tokenizer_gguf`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _words(*, digits: str, letters: str = r"\p{L}", symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """The cl100k shape: contractions, a word with one leading symbol, up to some digits, symbols, line ends, blanks."""
    return rf"{_CONTRACTIONS}|{_WORD_LEAD}{letters}+|{digits}| ?{symbols}{_TAIL}"


def _cased(*, digits: str, suffix: str = "") -> str:
    """The o200k shape: words split where lower case turns to upper."""
    head = rf"{_WORD_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_WORD_LEAD}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{head}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`splits`: patterns applied in order, each isolating its matches. `gpt2`: then GPT-2's own pattern. `single_digits`: digits split one
    by one first. `ignore_merges`: a word that is a token as a whole stays whole. `nfc`: text is normalised first. `add_bos`: default."""

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    single_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False

    def build(self) -> Any:
        """The `tokenizers` pre-tokenizer; ends in the byte alphabet."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any:
        """NFC or None."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS_GPT2 = PreTokenizer(gpt2=True, single_digits=True)
_CL100K_3 = PreTokenizer((_words(digits=r"\p{N}{1,3}"),))
_LLAMA3 = replace(_CL100K_3, ignore_merges=True, add_bos=True)
_CL100K_1 = PreTokenizer((_words(digits=r"\p{N}"),))
_QWEN2 = replace(_CL100K_1, nfc=True)
_QWEN35 = PreTokenizer((_words(digits=r"\p{N}", letters=r"[\p{L}\p{M}]", symbols=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True)
_TEKKEN = PreTokenizer((_cased(digits=r"\p{N}"),), ignore_merges=True, add_bos=True)
_O200K = PreTokenizer((_cased(digits=r"\p{N}{1,3}", suffix=_CONTRACTIONS + "?"),))
_CJK_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""" + _TAIL
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _CJK_WORDS))
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), single_digits=True)
_BLOOM = PreTokenizer((r" ?[^(\s|[.,!?…。，、।۔،])]+",))
_SEED = PreTokenizer((_words(digits=r"\p{N}", symbols=r"[^\s\p{L}\p{N}\r\n]+"),))
_BAILING = PreTokenizer((r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",))

_GROUPS: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (_GPT2, ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "jina-es", "jina-de", "jina-v2-code", "roberta-bpe")),
    (_DIGITS_GPT2, ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum")),
    (replace(_DIGITS_GPT2, nfc=True), ("command-r",)),
    (_LLAMA3, ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0")),
    (_CL100K_3, ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (_QWEN2, ("qwen2", "megrez")),
    (_CL100K_1, ("deepseek-r1-qwen", "stablelm2", "hunyuan", "grok-2", "solar-open")),
    (_QWEN35, ("qwen35",)),
    (_TEKKEN, ("tekken",)),
    (_O200K, ("gpt-4o", "llama4", "minimax-m2")),
    (_DEEPSEEK3, ("deepseek-v3", "hunyuan-dense")),
    (_DEEPSEEK_CODER, ("deepseek-coder",)),
    (_BLOOM, ("bloom", "poro-chat", "gpt3-finnish")),
    (_SEED, ("seed-coder",)),
    (_BAILING, ("bailingmoe",)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _GROUPS for name in names}
FALLBACK = _GPT2
