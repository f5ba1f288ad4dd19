"""Chat messages -> prompt text, by the model's own jinja template, as transformers renders it.

Owns the compiled template, what it can digest (found by probing it once), and the bounds of a render. Normalising of messages is in
`frontend.chat_messages`, the sandbox in `frontend.chat_sandbox`. Does not tokenize: the text goes to
`Tokenizer.encode(add_special_tokens=False)`, since the template writes BOS itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rootlet.core.errors import BadModelFile, InvalidValue, TemplateError
from rootlet.core.log import logger
from rootlet.formats.gguf_split import open_pieces
from rootlet.formats.hf import read_optional_json, token_text
from rootlet.formats.weights import is_gguf_model
from rootlet.frontend.chat_messages import TemplateTraits, normalise_messages
from rootlet.frontend.chat_sandbox import CompiledTemplate, RenderLimits
from rootlet.frontend.tokenizer_gguf import special_token_text

_log = logger("frontend")

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)

RESERVED_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "tokenizer"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now", "namespace", "dict", "range", "self"),
        *("lipsum", "cycler", "joiner", "loop", "caller", "varargs", "kwargs", "processor_kwargs"),
    )
)
_TAIL_MARK = "\ue000continue\ue001 "  # ends in a blank: gone after rendering = the template trims
_PROBE_CPU_S = 0.5
_PROBE = "\ue000probe\ue001"


def check_template_kwargs(kwargs: Mapping[str, Any], *, param: str = "chat_template_kwargs") -> None:
    """Refuse names through which a request could replace what the server decides. Raises: InvalidValue naming `param`.NAME."""
    for name in kwargs:
        if name in RESERVED_KWARGS:
            raise InvalidValue(f"{param}.{name}", f"{param}.{name} is decided by the server and cannot be set by a request.")
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise InvalidValue(param, f"{param}: {name!r} is not a possible variable name.")


class ChatTemplate:
    """One compiled template. Rendering is safe from any thread and leaves `messages` as they are."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """Compile and probe. `special_tokens` = further names the template may print (unk_token ...); `tool_source` = the template to use
        when tools are given. Raises: BadModelFile for a template that does not compile."""
        self.source = source
        tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._globals: dict[str, Any] = {name: text for name, text in tokens.items() if text is not None}
        self._compiled = CompiledTemplate(source, limits or RenderLimits())
        self._traits = self._probe()
        self._tool_template: ChatTemplate | None = None
        if tool_source is not None:
            self._tool_template = ChatTemplate(tool_source, bos_token=bos_token, eos_token=eos_token, special_tokens=special_tokens, limits=limits)

    @property
    def traits(self) -> TemplateTraits:
        """What the probes found: which roles want parts, whether arguments should be mappings."""
        return self._traits

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of `messages` (OpenAI shape, role and content). `continue_final_message`: end inside the last message instead of opening a
        new turn. `kwargs`: variables for the template (enable_thinking ...), checked against the reserved names.

        Raises: InvalidValue naming the field; TemplateError with the template's own words.
        """
        check_template_kwargs(kwargs)
        if tools and self._tool_template is not None:
            return self._tool_template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, **kwargs
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidValue("continue_final_message", "continue_final_message and add_generation_prompt exclude each other; set one of them.")
        chat = normalise_messages(messages, self._traits)
        variables = {"tools": list(tools) if tools else None, "documents": None, **kwargs}
        if not continue_final_message:
            return self._render(chat, add_generation_prompt=add_generation_prompt, **variables)
        tail = _mark_tail(chat)
        return _cut_tail(self._render(chat, add_generation_prompt=False, **variables), tail)

    def _render(self, chat: list[dict[str, Any]], **variables: Any) -> str:
        return self._compiled.render({**self._globals, **variables, "messages": chat})

    def _probe(self) -> TemplateTraits:
        """Render tiny chats to learn what the template prints well; a template that fails on all of them is taken as the plain kind."""
        parts_roles = frozenset(role for role in ("system", "user", "assistant", "tool") if self._wants_parts(role))
        argument_texts = self._wants_argument_texts("user" in parts_roles)
        return TemplateTraits(parts_roles=parts_roles, mentions_developer="developer" in self.source, argument_texts=argument_texts)

    def _wants_parts(self, role: str) -> bool:
        return not self._shows(role, _PROBE) and self._shows(role, [{"type": "text", "text": _PROBE}])

    def _shows(self, role: str, content: Any) -> bool:
        user: dict[str, Any] = {"role": "user", "content": content}
        call: dict[str, Any] = _probe_call({"k": "v"})
        chats = {
            "system": [{"role": "system", "content": content}, user],
            "user": [user],
            "assistant": [user, {"role": "assistant", "content": content}, user],
            "tool": [user, call, {"role": "tool", "content": content, "tool_call_id": "call00000", "name": "f"}],
        }
        text = self._try_render(chats[role])
        wanted = {"assistant": 3, "system": 2, "tool": 2, "user": 1}[role]
        return text is not None and text.count(_PROBE) >= wanted and "'type'" not in text and '"type"' not in text

    def _wants_argument_texts(self, user_parts: bool) -> bool:
        """Mappings unless they fail or come out as a Python repr, and JSON text does better."""
        user = {"role": "user", "content": [{"type": "text", "text": "x"}] if user_parts else "x"}
        as_mapping = self._try_render([user, _probe_call({_PROBE: "v"}), user])
        if as_mapping is not None and f"{{'{_PROBE}'" not in as_mapping:
            return False
        as_text = self._try_render([user, _probe_call(f'{{"{_PROBE}": "v"}}'), user])
        return as_text is not None and _PROBE in as_text

    def _try_render(self, chat: list[dict[str, Any]]) -> str | None:
        try:
            return self._compiled.render(
                {**self._globals, "messages": chat, "tools": None, "documents": None, "add_generation_prompt": False}, cpu_s=_PROBE_CPU_S
            )
        except TemplateError:
            return None


def _probe_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]}


def _mark_tail(chat: list[dict[str, Any]]) -> str:
    """Put a mark behind the last message's text, in place; returns that text."""
    last, index = chat[-1], len(chat) - 1
    content = last["content"]
    if isinstance(content, str) and content:
        last["content"] = content + _TAIL_MARK
        return content
    if isinstance(content, list) and content:
        text = content[-1]["text"]
        last["content"] = [*content[:-1], {**content[-1], "text": text + _TAIL_MARK}]
        return str(text)
    raise InvalidValue(f"messages[{index}].content", "continue_final_message needs a last message with text to continue.")


def _cut_tail(text: str, tail: str) -> str:
    """`text` up to the mark. Where the template trims its messages, the tail's own last blanks go too."""
    end = text.rfind(_TAIL_MARK.strip())
    if end < 0 or tail.strip() not in text[:end]:
        raise TemplateError("continue_final_message: the chat template does not print the last message as it is, so it cannot be continued.")
    return text[:end] if text.startswith(_TAIL_MARK, end) else text[:end].rstrip()


def load_chat_template(path: Path, override: Path | None = None) -> ChatTemplate:
    """The template of the model at `path`, or the one in the file `override`; without any, ChatML with a warning.

    Raises: BadModelFile if a template does not compile or `override` cannot be read.
    """
    sources, tokens = _from_gguf(path) if is_gguf_model(path) else _from_folder(path if path.is_dir() else path.parent)
    if override is not None:
        sources = {"default": _source_of(override, f"--chat-template {override}")}
    if "default" not in sources:
        _log.warning("chat_template_missing", model=path.name, using="chatml", knob="--chat-template")
        sources = {"default": CHATML}
    further = {name: text for name, text in tokens.items() if name not in ("bos_token", "eos_token")}
    return ChatTemplate(
        sources["default"],
        bos_token=tokens.get("bos_token"),
        eos_token=tokens.get("eos_token"),
        special_tokens=further,
        tool_source=sources.get("tool_use"),
    )


def _source_of(file: Path, shown: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadModelFile(f"{shown}: cannot be read ({error}).") from error


def _from_gguf(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    file = open_pieces(path)[0]
    found = {"default": file.value("tokenizer.chat_template"), "tool_use": file.value("tokenizer.chat_template.tool_use")}
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = {name: special_token_text(file, key) for name, key in keys.items()}
    return {k: v for k, v in found.items() if isinstance(v, str) and v}, {k: v for k, v in tokens.items() if v is not None}


def _from_folder(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    settings = read_optional_json(folder, "tokenizer_config.json")
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    tokens = {name: token_text(settings.get(name)) for name in names}
    sources: dict[str, str] = {}
    stated = settings.get("chat_template") or read_optional_json(folder, "chat_template.json").get("chat_template")
    if isinstance(stated, str):
        sources["default"] = stated
    elif isinstance(stated, list):
        sources = {str(entry["name"]): str(entry["template"]) for entry in stated if isinstance(entry, dict) and {"name", "template"} <= entry.keys()}
    file = folder / "chat_template.jinja"
    if file.is_file():
        sources["default"] = _source_of(file, file.name)
    return sources, {name: text for name, text in tokens.items() if text is not None}
