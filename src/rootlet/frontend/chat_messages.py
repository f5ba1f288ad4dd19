"""Chat messages as clients send them -> messages that a template renders alike, whichever of the equivalent spellings was used.

Owns the equivalences: content absent = null = ""; a list of text parts = their joined text; arguments as JSON text = as a mapping;
developer = system; function_call = tool_calls. Refuses what a text model cannot read. Pure. Called by `frontend.chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootlet.core.errors import InvalidValue

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "image", "input_image", "input_audio", "audio", "audio_url", "video", "video_url", "file", "input_file")
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template can digest. `parts_roles`: roles whose content it loops over as parts and cannot print as text. `argument_texts`: it
    prints tool arguments as they are, so they must be JSON text. `mentions_developer`: it knows that role."""

    parts_roles: frozenset[str] = frozenset()
    argument_texts: bool = False
    mentions_developer: bool = False


def normalise_messages(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Fresh messages for a template with `traits`. Raises: InvalidValue naming messages[i] and the field."""
    if not isinstance(messages, list | tuple):
        raise InvalidValue("messages", "messages must be a list.")
    if not messages:
        raise InvalidValue("messages", "messages is empty; at least one message is needed.")
    out = []
    call_ids: set[str] = set()
    num_calls = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidValue(where, f"{where} must be an object with role and content.")
        fresh = _normalise(message, where, traits)
        calls = fresh.get("tool_calls") or []
        num_calls += len(calls)
        call_ids.update(call["id"] for call in calls if isinstance(call.get("id"), str))
        if fresh["role"] == "tool":
            _check_answers_a_call(fresh, where, call_ids, num_calls)
        out.append(fresh)
    return out


def _check_answers_a_call(message: dict[str, Any], where: str, call_ids: set[str], num_calls: int) -> None:
    call_id = message.get("tool_call_id")
    if num_calls == 0:
        raise InvalidValue(f"{where}.role", f"{where}: a tool message must follow an assistant message with tool_calls.")
    if call_id is not None and call_ids and call_id not in call_ids:
        raise InvalidValue(f"{where}.tool_call_id", f"{where}.tool_call_id {call_id!r} answers no tool call of an earlier message.")


def _normalise(message: Mapping[str, Any], where: str, traits: TemplateTraits) -> dict[str, Any]:
    role = message.get("role")
    if role is None:
        raise InvalidValue(f"{where}.role", f"{where}.role is missing; possible are {', '.join(ROLES)}.")
    if role not in ROLES:
        raise InvalidValue(f"{where}.role", f"{where}.role {role!r} is unknown; possible are {', '.join(ROLES)}.")
    if role == "function" or (role == "developer" and not traits.mentions_developer):
        role = "tool" if role == "function" else "system"
    fresh = {key: value for key, value in message.items() if value is not None and key not in ("tool_calls", "function_call")}
    fresh["role"] = role
    calls = _tool_calls(message, where, traits)
    if calls:
        fresh["tool_calls"] = calls
    text = content_text(message.get("content"), f"{where}.content")
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidValue(f"{where}.reasoning_content", f"{where}.reasoning_content must be a string.")
        fresh["reasoning_content"] = reasoning
        fresh.setdefault("thinking", reasoning)
    if role in traits.parts_roles:
        fresh["content"] = [{"type": "text", "text": text}] if text else []
    else:
        fresh["content"] = text
    return fresh


def content_text(content: Any, where: str) -> str:
    """The text of a content field: a string, null, or a list of text parts, joined. Raises: InvalidValue naming the part."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidValue(where, f"{where} must be a string, null, or a list of parts.")
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidValue(where, f"{where} must be an object with a type.")
    kind = part.get("type")
    if kind in _MEDIA_PARTS:
        raise InvalidValue(f"{where}.type", f"{where}.type is {kind!r}, but this model reads text only; possible is 'text'.")
    if kind == "refusal":
        kind, part = "text", {"text": part.get("refusal")}
    if kind not in _TEXT_PARTS:
        raise InvalidValue(f"{where}.type", f"{where}.type {kind!r} is unknown; possible is 'text'.")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidValue(f"{where}.text", f"{where}.text must be a string.")
    return text


def _tool_calls(message: Mapping[str, Any], where: str, traits: TemplateTraits) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if calls is None and legacy is not None:
        calls = [{"type": "function", "function": legacy}]
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise InvalidValue(f"{where}.tool_calls", f"{where}.tool_calls must be a list.")
    return [_tool_call(call, f"{where}.tool_calls[{index}]", traits) for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str, traits: TemplateTraits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidValue(f"{where}.function.name", f"{where} must be an object with function.name and function.arguments.")
    arguments = function.get("arguments")
    shaped = _arguments_text(arguments) if traits.argument_texts else _arguments_value(arguments)
    return {**call, "type": call.get("type", "function"), "function": {**function, "arguments": shaped}}


def _arguments_value(arguments: Any) -> Any:
    """Decoded JSON; text that is not JSON stays text; nothing is an empty mapping."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _arguments_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
