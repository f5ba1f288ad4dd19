"""Chat templates: text equal to transformers', all spellings of a message alike, errors in the template's words, bombs stopped."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from fixtures.tiny_tokenizers import byte_tokenizer, save_tokenizer
from rootlet.core.errors import BadModelFile, InvalidValue, TemplateError
from rootlet.frontend.chat_sandbox import RenderLimits
from rootlet.frontend.chat_template import CHATML, RESERVED_KWARGS, ChatTemplate, check_template_kwargs, load_chat_template
from rootlet.frontend.tokenizer import load_tokenizer

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] | trim }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{% for message in messages %}<{{ message.role }}>{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}</{{ message.role }}>{% endfor %}"
)
_CALLS = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}<{{ call.function.name }} "
_CALLS_END = ">{% endfor %}{% endfor %}"
TOOLS_LOOP = _CALLS + "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}" + _CALLS_END
TOOLS_JSON = _CALLS + "{{ call.function.arguments | tojson }}" + _CALLS_END
TOOLS_BOTH = _CALLS + "{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}" + _CALLS_END
TOOLS_TEXT = _CALLS + "{{ 'args:' + call.function.arguments }}" + _CALLS_END
LLAMA_LIKE = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = '26 Jul 2024' %}\n{%- endif %}\n"
    "{%- if tools is not none %}\n    {{- 'tools: ' }}\n    {%- for t in tools %}\n        {{- t | tojson(indent=4) }}\n"
    "        {{- '\\n\\n' }}\n    {%- endfor %}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role == 'tool' %}{%- continue %}{%- endif %}\n"
    "    {{- '<|start|>' + message['role'] + '|' + date_string + '|' + message['content'] | trim + '<|eot|>' }}\n{%- endfor %}\n"
    "{% generation %}{{ ' g' }}{% endgeneration %}\n{%- if add_generation_prompt %}\n    {{- '<|start|>assistant' }}\n{%- endif %}\n"
)
CHAT = [
    {"role": "user", "content": " Hi <b>&\"'你好 "},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more\n"},
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "é <x>", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}


def template(source: str, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>", **kwargs)


def call_turns(arguments: Any, **extra: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call], **extra},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
        {"role": "user", "content": "again"},
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("ref")
    save_tokenizer(byte_tokenizer(), folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("source", [SMOLLM, STRICT, CHATML, LLAMA_LIKE, TOOLS_JSON])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"tools": [TOOL]}, {"date_string": "1 Jan"}])
def test_row_14_text_and_ids_equal_transformers(reference: Any, tmp_path: Path, source: str, options: dict[str, Any]) -> None:
    options = {"add_generation_prompt": True, **options}
    expected = reference.apply_chat_template(CHAT, chat_template=source, tokenize=False, **options)
    text = template(source).render(CHAT, **options)
    assert text == expected
    save_tokenizer(byte_tokenizer(), tmp_path, settings={"chat_template": source})
    ids = load_tokenizer(tmp_path).encode(text, add_special_tokens=False)
    assert ids == reference.apply_chat_template(CHAT, chat_template=source, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("source", [SMOLLM, STRICT, PARTS])
@pytest.mark.parametrize("tail", ["yes", "yes \n", "  yes"])
def test_continued_message_equals_transformers(reference: Any, source: str, tail: str) -> None:
    chat: list[dict[str, Any]] = [CHAT[0], {"role": "assistant", "content": tail}]
    shaped = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat] if source == PARTS else chat
    expected = reference.apply_chat_template(shaped, chat_template=source, tokenize=False, continue_final_message=True)
    assert template(source).render(chat, add_generation_prompt=False, continue_final_message=True) == expected


def test_row_09_templates_words_reach_the_client() -> None:
    strict = template(STRICT)
    with pytest.raises(TemplateError, match=r"^System role not supported$"):
        strict.render([{"role": "system", "content": "s"}])
    with pytest.raises(TemplateError, match=r"^Roles must alternate user/assistant$"):
        strict.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(TemplateError, match="Roles must alternate"):
        strict.render([{"role": "assistant", "content": "a"}])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{}], "messages[0].role"),
        (["hi"], "messages[0]"),
        ([CHAT[0], {"role": "alien", "content": "x"}], "messages[1].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*call_turns("{}")[:2], {"role": "tool", "tool_call_id": "other", "content": "x"}], "messages[2].tool_call_id"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    ],
)
def test_row_09_bad_messages_name_the_field(messages: Any, param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        template(SMOLLM).render(messages)
    assert caught.value.param == param


def test_row_09_other_chats_render() -> None:
    smollm = template(SMOLLM)
    for chat in (
        [{"role": "assistant", "content": "a"}],
        [{"role": "system", "content": "s"}],
        [CHAT[0], CHAT[0]],
        [{"role": "user", "content": "x"}] * 2000,
    ):
        assert smollm.render(chat).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("source", [SMOLLM, TOOLS_JSON, TOOLS_TEXT, PARTS])
def test_row_10_absent_null_and_empty_content_are_one(source: str) -> None:
    found = {template(source).render(call_turns("{}", **extra)) for extra in ({}, {"content": None}, {"content": ""}, {"content": []})}
    assert len(found) == 1
    assert "None" not in found.pop()


@pytest.mark.parametrize("source", [SMOLLM, PARTS, CHATML])
@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
def test_row_12_parts_render_like_their_text(source: str, role: str) -> None:
    def chat(content: Any) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = call_turns("{}", content="c")
        place = {"system": 0, "user": 0, "assistant": 1, "tool": 2}[role]
        turns[place] = {**turns[place], "role": role, "content": content}
        return turns

    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    text = template(source).render(chat(parts))
    assert text == template(source).render(chat("AB"))
    assert "AB" in text
    assert "'type'" not in text


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "hologram", None])
def test_row_12_other_parts_are_refused(kind: str | None) -> None:
    with pytest.raises(InvalidValue) as caught:
        template(SMOLLM).render([{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": kind, "image_url": {"url": "x"}}]}])
    assert caught.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize("source", [TOOLS_LOOP, TOOLS_JSON, TOOLS_BOTH])
@pytest.mark.parametrize("arguments", ['{"a": "q\\"uo\'te", "b": {"c": [1, null]}}', '{"城": "北京"}', "{}"])
def test_row_15_arguments_reach_templates_decoded(reference: Any, source: str, arguments: str) -> None:
    turns = call_turns(arguments, content="") * 2
    expected = reference.apply_chat_template(call_turns(json.loads(arguments), content="") * 2, chat_template=source, tokenize=False)
    assert template(source).render(turns, add_generation_prompt=False) == expected
    decoded = call_turns(json.loads(arguments), content="") * 2
    assert template(source).render(decoded, add_generation_prompt=False) == expected


def test_row_15_five_turns_do_not_get_worse() -> None:
    text = template(TOOLS_JSON).render([turn for _ in range(5) for turn in call_turns('{"a": {"b": "\\"x\\""}}')])
    assert text.count('<f {"a": {"b": "\\"x\\""}}>') == 5


@pytest.mark.parametrize("source", [TOOLS_LOOP, TOOLS_JSON, TOOLS_BOTH, TOOLS_TEXT])
@pytest.mark.parametrize("arguments", ["", "{broken", "5", '"text"', "[" * 100000, None])
def test_row_15_odd_arguments_render_or_fail_in_words(source: str, arguments: Any) -> None:
    try:
        assert "<f " in template(source).render(call_turns(arguments))
    except TemplateError as error:
        assert source == TOOLS_LOOP
        assert "has no attribute 'items'" in error.message  # noqa: PT017


def test_row_15_text_templates_get_text() -> None:
    assert '<f args:{"a": "é"}>' in template(TOOLS_TEXT).render(call_turns('{"a": "é"}'))
    assert '<f args:{"a": "é"}>' in template(TOOLS_TEXT).render(call_turns({"a": "é"}))
    assert "<f {broken>" in template(TOOLS_BOTH).render(call_turns("{broken"))


def test_roles_of_other_dialects() -> None:
    smollm = template(SMOLLM)
    assert smollm.render([{"role": "developer", "content": "s"}, CHAT[0]]) == smollm.render([{"role": "system", "content": "s"}, CHAT[0]])
    legacy = [CHAT[0], {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, {"role": "function", "name": "f", "content": "r"}]
    assert "<f {}><tool>r" in template(TOOLS_JSON).render(legacy)


def test_reasoning_reaches_the_template_under_its_name() -> None:
    source = "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{% endfor %}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert template(source).render([{"role": "assistant", "content": "a", name: "why"}]) == "a(why)"


def test_messages_are_left_alone() -> None:
    chat = call_turns('{"a": 1}')
    before = json.dumps(chat)
    template(TOOLS_LOOP).render(chat)
    assert json.dumps(chat) == before


def test_row_94_kwargs_cannot_replace_what_the_server_decides() -> None:
    for name in RESERVED_KWARGS | {"_x", "a b"}:
        with pytest.raises(InvalidValue, match="chat_template_kwargs"):
            check_template_kwargs({name: 1})
    for name in ("chat_template", "tokenize", "padding", "return_dict", "messages", "tools"):
        assert name in RESERVED_KWARGS
    with pytest.raises(InvalidValue):
        template(SMOLLM).render(CHAT, tokenize=True)
    assert template("{{ enable_thinking }}{{ messages[0].content }}").render([CHAT[1]], enable_thinking=False) == "Falseyes"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(0) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ ['a'] * 10000000000 }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%099999999999d' % 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_row_94_bombs_are_stopped(source: str) -> None:
    bomb = template(source, limits=RenderLimits(cpu_s=0.02, output_len=100_000))
    start = time.thread_time()
    with pytest.raises(TemplateError):
        bomb.render(CHAT)
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages.__init__.__globals__ }}"])
def test_row_97_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError, match="unsafe"):
        template(source).render(CHAT)


def test_broken_template_is_refused_at_start() -> None:
    with pytest.raises(BadModelFile, match="chat template, line 2"):
        template("\n{% for %}")


def test_other_failures_are_template_errors() -> None:
    for source in ("{{ messages[0].content + 1 }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}"):
        with pytest.raises(TemplateError):
            template(source).render(CHAT)


def test_template_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert load_chat_template(tmp_path).source == CHATML
    assert "chat_template_missing" in caplog.text
    save_tokenizer(
        byte_tokenizer(), tmp_path, settings={"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}
    )
    named = load_chat_template(tmp_path)
    assert (named.render(CHAT), named.render(CHAT, tools=[TOOL])) == ("D", "T")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}J{{ eos_token }}{{ unk_token }}")
    assert load_chat_template(tmp_path).render(CHAT) == "<|im_start|>J<|im_end|><|endoftext|>"
    (tmp_path / "mine.jinja").write_text("M")
    assert load_chat_template(tmp_path, tmp_path / "mine.jinja").render(CHAT) == "M"
    with pytest.raises(BadModelFile, match=r"--chat-template .*absent\.jinja: cannot be read"):
        load_chat_template(tmp_path, tmp_path / "absent.jinja")
