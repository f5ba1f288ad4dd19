"""Chat messages from the wire to what a chat template reads: roles, content parts, tool calls, tool results. Pure.

Content parts are joined to one string, so that every template sees the same text for both spellings; tool-call arguments (a JSON string on the wire)
are decoded, since templates are written for mappings. Source: docs/api.md, "Messages".
"""

from __future__ import annotations

from typing import Any

import orjson

from rootlet.core.errors import InvalidValue
from rootlet.server.errors import show
from rootlet.server.fields import Fields

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 100_000
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PASSED = ("name", "tool_call_id")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation for `ChatTemplate.render`. Raises `InvalidValue` naming the message and the field."""
    raw = fields.array("messages")
    if not raw:
        raise fields.refuse("messages", "a list of at least one message")
    if len(raw) > MAX_MESSAGES:
        raise fields.refuse("messages", f"a list of at most {MAX_MESSAGES} messages")
    call_ids: set[str] = set()
    any_call = False
    messages = []
    for i, item in enumerate(raw):
        path = f"{fields.param('messages')}[{i}]"
        if not isinstance(item, dict):
            raise InvalidValue(path, f"{path} must be an object with role and content, got {show(item)}")
        message = _message(Fields(item, path))
        if message["role"] == "tool":
            _check_result(message, path, call_ids, any_call=any_call)
        for call in message.get("tool_calls", ()):
            any_call = True
            call_ids.add(call.get("id") or "")
        any_call = any_call or "function_call" in item
        messages.append(message)
    return messages


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.string("role", choices=ROLES)
    if role is None:
        raise InvalidValue(fields.param("role"), f"{fields.param('role')} is required: one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(role, role)}
    calls = _tool_calls(fields) if role == "assistant" else []
    content = fields.raw("content")
    if content is None and role not in ("assistant", "tool", "function"):
        raise InvalidValue(fields.param("content"), f"{fields.param('content')} is required: a string or a list of text parts")
    message["content"] = read_content(content, fields.param("content"))
    if calls:
        message["tool_calls"] = calls
    for name in _PASSED:
        value = fields.string(name, max_chars=4096)
        if value is not None:
            message[name] = value
    thinking = fields.string(fields.present("reasoning_content", "reasoning") or "reasoning") if role == "assistant" else None
    if thinking is not None:
        message["reasoning_content"] = thinking
    return message


def read_content(content: object, param: str) -> str:
    """One string from a string, null, or a list of text parts. Raises `InvalidValue` for images, audio and other parts, naming their type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(param, f"{param} must be a string or a list of parts, got {show(content)}")
    texts = []
    for i, part in enumerate(content):
        path = f"{param}[{i}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidValue(path, f"{path} must be an object with a type, got {show(part)}")
        key = _TEXT_PARTS.get(part["type"])
        if key is None:
            raise InvalidValue(f"{path}.type", f"{path} is a part of type {show(part['type'])}; this model reads text parts only")
        if not isinstance(part.get(key), str):
            raise InvalidValue(f"{path}.{key}", f"{path}.{key} must be a string, got {show(part.get(key))}")
        texts.append(part[key])
    return "".join(texts)


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    calls = []
    for i, item in enumerate(fields.array("tool_calls") or []):
        path = f"{fields.param('tool_calls')}[{i}]"
        if not isinstance(item, dict):
            raise InvalidValue(path, f"{path} must be an object, got {show(item)}")
        call = Fields(item, path)
        function = call.object("function")
        if function is None:
            raise InvalidValue(call.param("function"), f"{call.param('function')} is required: an object with name and arguments")
        calls.append({"id": call.string("id", max_chars=4096), "type": "function", "function": _function(function)})
    legacy = fields.object("function_call")
    if legacy is not None:
        calls.append({"id": None, "type": "function", "function": _function(legacy)})
    return [call if call["id"] is not None else {"type": call["type"], "function": call["function"]} for call in calls]


def _function(fields: Fields) -> dict[str, Any]:
    name = fields.string("name", max_chars=4096)
    if name is None:
        raise InvalidValue(fields.param("name"), f"{fields.param('name')} is required: a string")
    return {"name": name, "arguments": _arguments(fields)}


def _arguments(fields: Fields) -> dict[str, Any] | str:
    value = fields.raw("arguments")
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise fields.refuse("arguments", "a JSON string")
    try:
        decoded = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value  # what the model wrote is shown to it as it wrote it
    return decoded if isinstance(decoded, dict) else value


def _check_result(message: dict[str, Any], path: str, call_ids: set[str], *, any_call: bool) -> None:
    call_id = message.get("tool_call_id")
    if not any_call:
        raise InvalidValue(path, f"{path} has role tool, but no earlier assistant message has tool_calls")
    if call_id is not None and "" not in call_ids and call_ids and call_id not in call_ids:
        raise InvalidValue(f"{path}.tool_call_id", f"{path}.tool_call_id {show(call_id)} matches no earlier tool call")


def read_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Tool definitions for the template, legacy `functions` included; None when there are none. Raises `InvalidValue`."""
    tools: list[dict[str, Any]] = []
    for name, is_legacy in (("tools", False), ("functions", True)):
        for i, item in enumerate(fields.array(name) or []):
            path = f"{fields.param(name)}[{i}]"
            if not isinstance(item, dict):
                raise InvalidValue(path, f"{path} must be an object, got {show(item)}")
            tools.append(_tool({"type": "function", "function": item} if is_legacy else item, path))
    return tools or None


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidValue(f"{path}.type", f'{path}.type must be "function", got {show(tool.get("type"))}')
    function = Fields(tool, path).object("function")
    if function is None or not function.string("name", max_chars=256):
        raise InvalidValue(f"{path}.function.name", f"{path}.function.name is required: a string")
    parameters = function.object("parameters")
    assert parameters is None or isinstance(parameters.data, dict)
    return tool
