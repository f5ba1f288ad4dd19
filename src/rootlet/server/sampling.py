"""Request fields to `SamplingParams`, for the OpenAI dialect (fields beside the prompt) and the native one (an object `sampling_params`).

An absent or null field takes the model's recommendation when the server runs with `--sampling-defaults model`, else OpenAI's default. What this
server cannot enforce (schemas, grammars, forced tool calls, more candidates than answers) is refused, never ignored. Source: docs/api.md,
"Sampling parameters".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rootlet.core.errors import InvalidValue, Unsupported
from rootlet.core.sampling_params import MAX_STOPS, SamplingParams, check_num_ids, validate
from rootlet.server.errors import show
from rootlet.server.fields import Fields

_TOKEN_KEY = re.compile(r"-?[0-9]{1,19}")
_RENAMED = {
    "guided_json": "response_format or structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_decoding_backend": "the server's own choice of engine",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
}
_CONSTRAINTS = ("structured_outputs", "json_schema", "regex", "ebnf", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the server and its model allow. `recommended` = the model's own sampling defaults, empty when they are switched off."""

    vocab_size: int
    max_n: int
    max_logprobs: int
    max_temperature: float
    recommended: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTokens:
    """How a dialect spells and defaults the length: `names` in order of preference, `default` None = what the context leaves."""

    names: tuple[str, ...]
    default: int | None
    zero_ok: bool


def read_sampling(fields: Fields, limits: Limits, length: MaxTokens) -> SamplingParams:
    """The request's parameters, validated. Raises `InvalidValue` naming the field, `Unsupported` for what cannot be enforced."""
    refuse_constraints(fields)
    used, max_new_tokens = _max_tokens(fields, length)
    top_k = _top_k(fields, limits)
    params = SamplingParams(
        temperature=_number(fields, "temperature", limits, 1.0),
        top_p=_number(fields, "top_p", limits, 1.0),
        min_p=_number(fields, "min_p", limits, 0.0),
        presence_penalty=_number(fields, "presence_penalty", limits, 0.0),
        frequency_penalty=_number(fields, "frequency_penalty", limits, 0.0),
        repetition_penalty=_number(fields, "repetition_penalty", limits, 1.0),
        max_new_tokens=max_new_tokens,
        min_new_tokens=fields.integer(fields.present("min_tokens", "min_new_tokens") or "min_tokens", low=0) or 0,
        top_k=top_k,
        logit_bias=_logit_bias(fields, limits.vocab_size),
        allowed_token_ids=_allowed(fields, limits.vocab_size),
        stop=_stop(fields),
        stop_token_ids=_ids(fields, "stop_token_ids", limits.vocab_size) or (),
        ignore_eos=fields.boolean("ignore_eos"),
        include_stop=fields.boolean("include_stop_str_in_output") or fields.boolean("no_stop_trim"),
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        seed=_seed(fields),
        n=_n(fields, limits),
    )
    try:
        validate(params, limits.vocab_size, max_n=limits.max_n, max_temperature=limits.max_temperature)
    except InvalidValue as error:  # the core's names are the OpenAI ones; say it in the words of this request
        name = {"max_tokens": used, "min_tokens": fields.present("min_tokens", "min_new_tokens") or "min_tokens"}.get(error.param or "", error.param)
        raise InvalidValue(fields.param(name) if name else None, error.message) from None
    return params


def refuse_constraints(fields: Fields) -> None:
    """Structured output that this server cannot enforce is an error, since a client relies on it."""
    for old, new in _RENAMED.items():
        if fields.present(old):
            raise InvalidValue(fields.param(old), f"{fields.param(old)} is no longer a parameter; use {new}")
    name = fields.present(*_CONSTRAINTS)
    if name:
        raise Unsupported(f"{fields.param(name)} is not supported by this server: output cannot be constrained yet", param=fields.param(name))


def _max_tokens(fields: Fields, length: MaxTokens) -> tuple[str, int | None]:
    used = fields.present(*length.names) or length.names[-1]
    for name in length.names:
        fields.integer(name, low=0 if length.zero_ok else 1)
    value = fields.integer(used)
    return used, length.default if value is None else value


def _number(fields: Fields, name: str, limits: Limits, default: float) -> float:
    value = fields.number(name)
    if value is not None:
        return value
    recommended = limits.recommended.get(name)
    return float(recommended) if isinstance(recommended, int | float) else default


def _top_k(fields: Fields, limits: Limits) -> int:
    value = fields.integer("top_k", low=-1)
    if value is None:
        recommended = limits.recommended.get("top_k")
        value = recommended if isinstance(recommended, int) else 0
    return 0 if value < 1 or value >= limits.vocab_size else value


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    bias = fields.object("logit_bias")
    if bias is None:
        return {}
    check_num_ids(bias.path, len(bias.data), vocab_size)
    result: dict[int, float] = {}
    for key in bias.data:
        if not _TOKEN_KEY.fullmatch(key):
            raise InvalidValue(bias.path, f"{bias.path} has the key {show(key)}; keys must be token ids (0..{vocab_size - 1}) as strings")
        if bias.data[key] is None:
            raise bias.refuse(key, "a finite number in [-100, 100]")
        value = bias.number(key, low=-100.0, high=100.0)
        assert value is not None
        result[int(key)] = value
    return result


def _ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...] | None:
    check_num_ids(fields.param(name), len(fields.array(name) or ()), vocab_size)
    return fields.ids(name, vocab_size)


def _allowed(fields: Fields, vocab_size: int) -> tuple[int, ...] | None:
    ids = _ids(fields, "allowed_token_ids", vocab_size)
    if ids == ():
        raise fields.refuse("allowed_token_ids", "a list of at least one token id")
    return ids


def _stop(fields: Fields) -> tuple[str, ...]:
    stops = fields.strings("stop")
    if "" in stops:
        raise InvalidValue(fields.param("stop"), f"{fields.param('stop')} must not hold an empty string")
    if len(stops) > MAX_STOPS:
        raise InvalidValue(fields.param("stop"), f"{fields.param('stop')} may hold at most {MAX_STOPS} strings, got {len(stops)}")
    return stops


def _seed(fields: Fields) -> int | None:
    name = fields.present("seed", "sampling_seed") or "seed"
    seed = fields.integer(name, low=-(2**63), high=2**63 - 1)
    return None if seed == -1 else seed


def _n(fields: Fields, limits: Limits) -> int:
    value = fields.integer("n", low=1, high=limits.max_n, knob="--max-n")
    n = 1 if value is None else value
    best_of = fields.integer("best_of", low=1, high=limits.max_n, knob="--max-n")
    if best_of is not None and best_of != n:
        raise InvalidValue(fields.param("best_of"), f"best_of={best_of} is not supported; it must be absent or equal to n={n}")
    return n
