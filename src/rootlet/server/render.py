"""Messages to prompt text: the fields that steer a chat template, for every route that takes `messages`."""

from __future__ import annotations

from typing import Any

import orjson

from rootlet.core.errors import InvalidValue, Unsupported
from rootlet.server.context import ServerContext, offload
from rootlet.server.fields import Fields
from rootlet.server.messages import num_chars, read_messages, read_tools

_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


async def render(fields: Fields, context: ServerContext) -> str:
    """The prompt text of `messages`. Raises `TemplateError`, `InvalidValue`."""
    messages = read_messages(fields)
    tools = None if fields.raw("tool_choice") == "none" or fields.raw("function_call") == "none" else read_tools(fields)
    continue_final = fields.boolean("continue_final_message")
    add_prompt = fields.boolean("add_generation_prompt", default=not continue_final)
    if continue_final and add_prompt:
        raise InvalidValue(fields.param("continue_final_message"), "continue_final_message and add_generation_prompt cannot both be true")
    if continue_final and messages[-1].get("role") != "assistant":
        raise InvalidValue(fields.param("continue_final_message"), "continue_final_message needs an assistant message at the end of messages")
    template = context.manager.chat_template
    extra = template_kwargs(fields)

    def work() -> str:
        return template.render(messages, tools=tools, add_generation_prompt=add_prompt, continue_final_message=continue_final, **extra)

    size = num_chars(messages) + (len(orjson.dumps([tools, extra])) if tools or extra else 0)
    prompt = await offload(size, work)
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:  # the JSON inside a tool call's arguments can spell half a surrogate pair
        raise InvalidValue(fields.param("messages"), "messages render to text that is not valid Unicode (a lone surrogate)") from None
    return prompt


def template_kwargs(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs` and `reasoning_effort`: variables for the template. Raises `InvalidValue` for the template's own names."""
    if fields.raw("chat_template") is not None:
        raise Unsupported("a chat template in the request is not accepted; the server's is set with --chat-template", param="chat_template")
    given = fields.object("chat_template_kwargs")
    kwargs: dict[str, Any] = dict(given.data) if given else {}
    taken = sorted(_RESERVED & kwargs.keys())
    if given and taken:
        raise InvalidValue(given.param(taken[0]), f"{given.param(taken[0])} is set by the request itself")
    effort = fields.string("reasoning_effort", max_chars=32)
    return {"reasoning_effort": effort, **kwargs} if effort is not None else kwargs
