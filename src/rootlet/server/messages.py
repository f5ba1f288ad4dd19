"""The `messages` and `tools` fields of a chat request, as far as the wire goes: shape and size. What is in a message (roles, parts, tool calls) is
judged where it is rendered, `frontend/chat_messages.py`, so that the offline engine and every dialect agree. Pure.
"""

from __future__ import annotations

from typing import Any

from rootlet.core.errors import InvalidValue
from rootlet.server.errors import show
from rootlet.server.fields import Fields

MAX_MESSAGES = 100_000
MAX_TOOLS = 4096


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """A list of at least one object. Raises `InvalidValue` naming the message."""
    messages = fields.array("messages")
    if not messages:
        raise fields.refuse("messages", "a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise fields.refuse("messages", f"a list of at most {MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            path = f"{fields.param('messages')}[{i}]"
            raise InvalidValue(path, f"{path} must be an object with role and content, got {show(message)}")
    return messages


def num_chars(messages: list[dict[str, Any]]) -> int:
    """About how much text there is to render."""
    total = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        total += 200 + sum(len(text) for part in parts if isinstance(text := part.get("text") if isinstance(part, dict) else part, str))
    return total


def read_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Tool definitions for the template, legacy `functions` included; None when there are none. Raises `InvalidValue`."""
    tools: list[dict[str, Any]] = []
    for name, is_legacy in (("tools", False), ("functions", True)):
        given = fields.array(name) or []
        if len(given) > MAX_TOOLS:
            raise fields.refuse(name, f"a list of at most {MAX_TOOLS} tools")
        for i, item in enumerate(given):
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
