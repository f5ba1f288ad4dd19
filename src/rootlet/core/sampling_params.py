"""How one request draws its tokens: the internal form that every dialect is translated into.

Validated once, at the front (`validate`), before any work is done; everything behind it may trust it. Ranges: docs/api.md.
Order of operations (one definition for every executor): raw logprobs taken -> allowed ids -> min_tokens mask -> logit_bias -> repetition ->
frequency, presence -> grammar mask -> greedy if temperature < 1e-5 (lowest id on ties) -> temperature -> top_k -> top_p on the
renormalised rest -> min_p relative to the best survivor -> draw.
"""

from __future__ import annotations

import math

import msgspec

from rootlet.core.errors import InvalidValue

GREEDY_BELOW = 1e-5
MAX_TEMPERATURE = 2.0  # of OpenAI's dialect and of the terminal; the native one and the library go further
MAX_STOPS = 32
MAX_CHOICE_INDEX = 2**30  # with n beside it, the kernels' 32 bits hold it
MAX_STOP_CHARS = 4096  # of all of them together: the matcher takes some microseconds and some hundred bytes for each


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """`max_new_tokens` None = as many as fit; 0 = prefill only. `top_k` 0 or -1 = off. `seed` None = one is drawn at the front and reported.

    `choice_index` k of `n` parallel samples keys the noise stream (seed, k), so choice 0 of n equals n=1 (architecture D6).
    `stop_token_ids` are honoured even with `ignore_eos`. `stop` strings are matched on detokenised text.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    choice_index: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    bad = not math.isfinite(value) or value > high or value < low or (open_low and value == low)
    if bad:
        bracket = "(" if open_low else "["
        raise InvalidValue(name, f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def check_num_ids(name: str, num: int, vocab_size: int) -> None:
    """More ids than there are say nothing new, and every step would go over them. Raises `InvalidValue`."""
    if num > vocab_size:
        raise InvalidValue(name, f"{name} holds {num} token ids, more than the vocabulary of {vocab_size}")


def _ids_in_vocab(name: str, ids: tuple[int, ...] | list[int], vocab_size: int) -> None:
    check_num_ids(name, len(ids), vocab_size)
    for i in ids:
        if not 0 <= i < vocab_size:
            raise InvalidValue(name, f"{name} holds token id {i}, outside the vocabulary of {vocab_size} (0..{vocab_size - 1})")


def validate(p: SamplingParams, vocab_size: int, *, max_n: int, max_temperature: float = math.inf) -> None:
    """Refuse what no executor should ever see. Raises `InvalidValue` naming field, value and limit; cost O(ids named)."""
    top = max_temperature if math.isfinite(max_temperature) else 1e30
    _in_range("temperature", p.temperature, 0.0, top)
    _in_range("top_p", p.top_p, 0.0, 1.0, open_low=True)
    _in_range("min_p", p.min_p, 0.0, 1.0)
    _in_range("presence_penalty", p.presence_penalty, -2.0, 2.0)
    _in_range("frequency_penalty", p.frequency_penalty, -2.0, 2.0)
    _in_range("repetition_penalty", p.repetition_penalty, 0.0, 10.0, open_low=True)
    if p.top_k < -1:
        raise InvalidValue("top_k", f"top_k must be -1 or 0 (off) or at least 1, got {p.top_k}")
    if p.max_new_tokens is not None and p.max_new_tokens < 0:
        raise InvalidValue("max_tokens", f"max_tokens must be at least 0, got {p.max_new_tokens}")
    if p.min_new_tokens < 0 or (p.max_new_tokens is not None and p.min_new_tokens > p.max_new_tokens):
        raise InvalidValue("min_tokens", f"min_tokens must be in [0, max_tokens], got {p.min_new_tokens}")
    if not 1 <= p.n <= max_n:
        raise InvalidValue("n", f"n must be in [1, {max_n}], got {p.n} (limit: --max-n)")
    if not 0 <= p.choice_index <= MAX_CHOICE_INDEX:
        raise InvalidValue("choice_index", f"choice_index must be in [0, {MAX_CHOICE_INDEX}], got {p.choice_index}")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise InvalidValue("allowed_token_ids", "allowed_token_ids is empty: at least one token must be allowed")
    if p.seed is not None and not -(2**63) <= p.seed < 2**63:
        raise InvalidValue("seed", f"seed must be in [-2**63, 2**63), got {p.seed}")
    if len(p.stop) > MAX_STOPS:
        raise InvalidValue("stop", f"at most {MAX_STOPS} stop strings, got {len(p.stop)}")
    if sum(map(len, p.stop)) > MAX_STOP_CHARS:
        raise InvalidValue("stop", f"stop strings may have at most {MAX_STOP_CHARS} characters together, got {sum(map(len, p.stop))}")
    _ids_in_vocab("stop_token_ids", p.stop_token_ids, vocab_size)
    _ids_in_vocab("allowed_token_ids", p.allowed_token_ids or (), vocab_size)
    _ids_in_vocab("logit_bias", list(p.logit_bias), vocab_size)
    for token, bias in p.logit_bias.items():
        if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
            raise InvalidValue("logit_bias", f"logit_bias[{token}] must be in [-100, 100], got {bias!r}")
