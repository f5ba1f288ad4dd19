"""The `prompt` field of `/v1/completions`: a string, strings, token ids, or lists of token ids, all checked before any work is started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rootlet.core.errors import InvalidValue
from rootlet.server.context import ServerContext, offload
from rootlet.server.errors import show
from rootlet.server.fields import check_ids

MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt. `text` as the client gave it, None for ids; `ids` None = the engine tokenizes. `param` names it in errors."""

    param: str
    text: str | None
    ids: tuple[int, ...] | None

    @property
    def content(self) -> str | tuple[int, ...]:
        """What goes to the engine."""
        if self.ids is not None:
            return self.ids
        assert self.text is not None
        return self.text


def read_prompts(value: Any, param: str, context: ServerContext, *, n: int) -> list[Prompt]:
    """Raises `InvalidValue` naming the item, `ContextOverflow`. Cost O(tokens given); what is too long is refused before it is looked at."""
    if isinstance(value, str):
        return [Prompt(param=param, text=value, ids=None)]
    if not isinstance(value, list):
        what = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise InvalidValue(param, f"{param} must be {what}, got {show(value)}")
    if not value:
        raise InvalidValue(param, f"{param} must not be empty")
    if not isinstance(value[0], str | list):
        return [Prompt(param=param, text=None, ids=_ids(value, param, context))]
    check_choices(context, len(value), len(value) * n, param)
    return [_item(item, f"{param}[{i}]", context, type(value[0])) for i, item in enumerate(value)]


def check_choices(context: ServerContext, num_prompts: int, num_choices: int, param: str) -> None:
    """The bounds on the choices (prompts * n) of one HTTP request. Raises `InvalidValue`, also for more than may ever be open at once on this
    server: that is no full queue, and trying again would never help."""
    asked = f"{param} holds {num_prompts} prompts, {num_choices} choices in all"
    if num_prompts > 1 and num_choices > MAX_CHOICES:
        raise InvalidValue(param, f"{asked}; one request may ask for at most {MAX_CHOICES}")
    max_open = context.max_open
    if num_prompts > 1 and max_open is not None and num_choices > max_open:
        raise InvalidValue(param, f"{asked}; at most {max_open} may run and wait at once on this server (limits: --max-running, --max-queue)")


def _item(item: Any, param: str, context: ServerContext, kind: type) -> Prompt:
    if type(item) is not kind:
        raise InvalidValue(param, f"{param} must be {'a string' if kind is str else 'a list of token ids'} like the first prompt, got {show(item)}")
    if isinstance(item, str):
        return Prompt(param=param, text=item, ids=None)
    assert isinstance(item, list)
    return Prompt(param=param, text=None, ids=_ids(item, param, context))


def _ids(value: list[Any], param: str, context: ServerContext) -> tuple[int, ...]:
    context.check_prompt_len(param, len(value))
    return check_ids(value, param, context.vocab_size)


async def check_prompts(prompts: list[Prompt], context: ServerContext, *, add_special_tokens: bool, tokenize: bool) -> list[Prompt]:
    """Refuses prompts without tokens or beyond the context. Texts of a batch are tokenized here, so that none starts when one is refused."""
    tokenize = tokenize or len(prompts) > 1
    checked = []
    for prompt in prompts:
        ids = prompt.ids
        if ids is None and (tokenize or not prompt.text):
            text = prompt.text or ""
            context.check_text(prompt.param, text)
            encode = partial(context.manager.tokenizer.encode, text, add_special_tokens=add_special_tokens)
            ids = tuple(await offload(len(text), encode))
        if ids is not None:
            if not ids:
                raise InvalidValue(prompt.param, f"{prompt.param} is empty: a prompt must have at least one token")
            context.check_prompt_len(prompt.param, len(ids))
        checked.append(Prompt(param=prompt.param, text=prompt.text, ids=ids))
    return checked
