"""What a call of the Python API says, as requests for the front. Pure functions, no engine.

Each refusal is an `InvalidValue` that names the argument, the value (cut) and what is possible, before any work is done. Types are strict, as they
are over HTTP: True is no number, "5" is none, 16.0 is no integer. Ranges are the front's business, one rule for every dialect.
"""

from __future__ import annotations

import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import msgspec

from rootlet.core.errors import InvalidValue
from rootlet.core.registry import did_you_mean
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import LogprobSpec
from rootlet.frontend.types import GenerateReq

_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_SAMPLING_NAMES = (*_ALIASES, *SamplingParams.__struct_fields__)
_ONE_OR_MANY = ("stop", "stop_token_ids", "allowed_token_ids")
_REQUEST = ("add_special_tokens", "rid", "lora_id", "extra_key", "cache_salt", "priority", "deadline_s", "user", "routing_key")
_PROMPTS = "a string, a list of token ids, a list of strings, or a list of lists of token ids"
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple[str, ...]: "a string or a list of strings",
    tuple[int, ...]: "a list of token ids (integers)",
    dict[int, float]: "a mapping from token ids (integers) to numbers",
}
_SAMPLING_TYPES = typing.get_type_hints(SamplingParams)
_REQUEST_TYPES = {name: hint for name, hint in typing.get_type_hints(GenerateReq).items() if name in _REQUEST}
_LOGPROB_TYPES = typing.get_type_hints(LogprobSpec)


def checked(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` says. Raises `InvalidValue` in the words of Python."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise InvalidValue(name, f"{name} must be {_in_words(hint)}, got {reprlib.repr(value)}") from None


def _in_words(hint: Any) -> str:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join("None" if option is types.NoneType else _WORDS[option] for option in options)


def _known(name: Any, names: Iterable[str], what: str) -> str:
    known = list(names)
    if name not in known:
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        raise InvalidValue(str(name)[:100], f"unknown {what} {reprlib.repr(name)}{hint} (known: {', '.join(known)})")
    return str(name)


def sampling_of(given: Mapping[str, Any] | SamplingParams | None, defaults: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from field names (and max_tokens, min_tokens); what is absent comes from `defaults`. Raises `InvalidValue`.

    Given `SamplingParams` stay as they are, but for the types of their fields, which nobody has checked yet.
    """
    if isinstance(given, SamplingParams):
        return SamplingParams(**{name: _sampling_field(name, value) for name, value in msgspec.structs.asdict(given).items()})
    named: dict[str, Any] = {}
    for key, value in _mapping("sampling", given).items():
        name = _ALIASES.get(key, key) if isinstance(key, str) else key
        if name in named:
            raise InvalidValue(key, f"{key} is given twice, under both of its names")
        name = _known(name, _SAMPLING_NAMES, "sampling parameter")
        named[name] = None if value is None else _sampling_field(name, value, key)
    return msgspec.convert({**defaults, **{k: v for k, v in named.items() if v is not None}}, SamplingParams)


def _mapping(name: str, given: object) -> Mapping[Any, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidValue(name, f"{name} must be a dict, SamplingParams or None, got {reprlib.repr(given)}")
    return given


def _sampling_field(name: str, value: Any, said: str = "") -> Any:
    if name in _ONE_OR_MANY and isinstance(value, str | int) and not isinstance(value, bool):
        value = (value,)
    return checked(said or name, value, _SAMPLING_TYPES[name])


def logprobs_of(given: int | LogprobSpec | None) -> LogprobSpec | None:
    """Raises `InvalidValue`."""
    if given is None:
        return None
    if isinstance(given, LogprobSpec):
        fields = msgspec.structs.asdict(given).items()
        return LogprobSpec(**{name: checked(f"logprobs.{name}", value, _LOGPROB_TYPES[name]) for name, value in fields})
    if not isinstance(given, int) or isinstance(given, bool):
        what = "the number of alternatives a token (0 = only the chosen one), a LogprobSpec, or None"
        raise InvalidValue("logprobs", f"logprobs must be {what}, got {reprlib.repr(given)}")
    return LogprobSpec(top_n=given)


def prompts_of(prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> tuple[list[str | tuple[int, ...]], bool]:
    """(prompts, was it a list of prompts). A sequence of ints is one prompt. Raises `InvalidValue` for anything else, a mixture too."""
    if isinstance(prompt, str):
        return [prompt], False
    items = _items("prompt", prompt, _PROMPTS)
    if not items:
        raise InvalidValue("prompt", "prompt is empty: at least one token is needed")
    if _is_id(items[0]):
        return [_ids("prompt", items)], False
    return [_one_prompt(f"prompt[{k}]", item) for k, item in enumerate(items)], True


def _items(name: str, value: object, wanted: str) -> list[Any]:
    """What `value` holds, in an order that means something: no sets, no mappings, no bytes."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set):
        try:
            return list(value)
        except TypeError:  # an array without dimensions calls itself iterable
            pass
    raise InvalidValue(name, f"{name} must be {wanted}, got {reprlib.repr(value)} of type {type(value).__name__}")


def _is_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _ids(name: str, items: list[Any]) -> tuple[int, ...]:
    """Token ids, numpy's integers too. O(ids), in C for the common case."""
    if set(map(type, items)) == {int}:
        return tuple(items)
    for k, item in enumerate(items):
        if not _is_id(item):
            raise InvalidValue(f"{name}[{k}]", f"{name}[{k}] must be a token id (an integer) as those before it, got {reprlib.repr(item)}")
    return tuple(map(int, items))


def _one_prompt(name: str, item: object) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    items = _items(name, item, "a string or a list of token ids")
    if not items:
        raise InvalidValue(name, f"{name} is empty: at least one token is needed")
    if not _is_id(items[0]):
        raise InvalidValue(f"{name}[0]", f"{name}[0] must be a token id (an integer), got {reprlib.repr(items[0])}")
    return _ids(name, items)


def requests_of(
    prompt: Any, sampling: SamplingParams, logprobs: Any, *, stream: bool, request: Mapping[str, Any], param: str = "prompt"
) -> tuple[list[GenerateReq], bool]:
    """(one request a prompt, did the caller give a list of prompts?). A rid in `request` names those of a list RID-0, RID-1..., as over HTTP.

    Raises `InvalidValue`."""
    stream = checked("stream", stream, bool)
    prompts, many = prompts_of(prompt)
    if stream and len(prompts) > 1:
        raise InvalidValue("prompt", f"a stream is of one prompt, got a list of {len(prompts)}; leave stream out, or call once for each")
    fields = {_known(name, _REQUEST, "argument"): checked(name, value, _REQUEST_TYPES[name]) for name, value in request.items()}
    spec = logprobs_of(logprobs)
    reqs = []
    for k, item in enumerate(prompts):
        own = {"rid": f"{fields['rid']}-{k}", "batch_rid": fields["rid"]} if many and fields.get("rid") else {}
        content: dict[str, Any] = {"prompt": item} if isinstance(item, str) else {"input_ids": item}
        place = f"{param}[{k}]" if many else param
        reqs.append(GenerateReq(**content, sampling=sampling, logprobs=spec, stream=stream, param=place, **{**fields, **own}))
    return reqs, many


def messages_of(messages: Any, template: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages of a chat, as a list; what is in one is judged where it is rendered. `template` is checked too. Raises `InvalidValue`."""
    items = _items("messages", messages, "a list of messages (dicts with role and content)")
    if not items:
        raise InvalidValue("messages", "messages is empty; at least one message is needed")
    _check_mappings("messages", items, "a dict with role and content")
    for name in template:
        if name in (*_REQUEST, "logprobs", "n", "max_tokens", "temperature"):
            raise InvalidValue(name, f"{name} is no variable of a chat template; chat takes messages, sampling, stream and what the template knows")
    tools = template.get("tools")
    if tools is not None:
        _check_mappings("tools", _items("tools", tools, "a list of tools (dicts)"), "a dict")
    for name in ("add_generation_prompt", "continue_final_message"):
        checked(name, template.get(name, False), bool)
    return items


def _check_mappings(name: str, items: list[Any], wanted: str) -> None:
    for k, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise InvalidValue(f"{name}[{k}]", f"{name}[{k}] must be {wanted}, got {reprlib.repr(item)}")


def token_ids_of(name: str, ids: Any, vocab_size: int) -> list[int]:
    """Token ids that the tokenizer knows. Raises `InvalidValue`."""
    items = _items(name, ids, "a list of token ids")
    given = list(_ids(name, items)) if items else []
    for k, item in enumerate(given):
        if not 0 <= item < vocab_size:
            raise InvalidValue(f"{name}[{k}]", f"{name}[{k}] is token id {item}, outside the vocabulary of {vocab_size} (0..{vocab_size - 1})")
    return given
