"""Rows TEMPLATE of the fault table (9, 10, 12, 14, 15) on real servers: the prompt is what transformers makes of the same chat.

Three models that differ in their template: strict text, parts, and arguments as JSON. `/tokenize` shows the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from fixtures.live_server import Live, live, tiny_flags, tiny_llama
from fixtures.tiny_models import write_gguf
from fixtures.wire import assert_refused, post, whole

pytestmark = pytest.mark.process

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
_CALLS = "{% for c in m.get('tool_calls') or [] %}<call>{{ c.function.name }} @</call>{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('system turns are not for this model') }}{% endif %}"
    "{% if m['role'] == 'user' and loop.index0 > 0 and messages[loop.index0 - 1]['role'] == 'user' %}{{ raise_exception('turns must alternate') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}"
    + _CALLS.replace("@", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}")
    + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] or [] %}{{ part['text'] }}{% endfor %}"
    + _CALLS.replace("@", "{{ c.function.arguments | tojson }}")
    + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
EITHER = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% elif m['content'] %}"
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}"
    + _CALLS.replace("@", "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}")
    + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
KINDS = {"strict": STRICT, "parts": PARTS, "either": EITHER}


def _checkpoint(folder: Path, template: str, *, add_bos: bool) -> Path:
    tiny_llama(folder, num_hidden_layers=1)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    if add_bos:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        bos = settings["bos_token"]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))])
        backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Add_bos: template with BOS + true; template without BOS + true; template whose first token is BOS text + false (as GGUF, below)."""
    root = tmp_path_factory.mktemp("templates")
    return {name: _checkpoint(root / name, template, add_bos=name != "strict") for name, template in KINDS.items()}


@pytest.fixture(scope="module", params=list(KINDS))
def served(folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[tuple[str, Live, Any]]:
    """(kind, server, the same tokenizer in transformers)."""
    name = request.param
    with live(folders[name], *tiny_flags(pool=4096), check=False) as server:
        yield name, server, AutoTokenizer.from_pretrained(folders[name])
        server.assert_live()


def ids(base: str, messages: Any, **fields: Any) -> list[int]:
    reply = post(base, "/tokenize", {"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return [int(i) for i in reply.json()["tokens"]]


def chat_of(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation that every template here takes, with `content` in the turn of `role`."""
    user, call = {"role": "user", "content": "u"}, _turn({"a": 1})
    chats = {"user": [{"role": "user", "content": content}], "system": [{"role": "system", "content": content}, user]}
    return chats.get(role) or [user, call, {"role": "tool", "content": content, "tool_call_id": "c1"}]


def _turn(arguments: Any, **fields: Any) -> dict[str, Any]:
    wire = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": wire}}
    return {"role": "assistant", "tool_calls": [call], **fields}


def test_row_09_what_the_template_refuses_is_400_in_its_words(served: tuple[str, Live, Any]) -> None:
    kind, server, _ = served
    base = server.server.base

    def ask(messages: Any, **fields: Any) -> Any:
        return post(base, CHAT, {"messages": messages, "max_tokens": 2, **fields})

    for messages in ([], None, [{}], [{"role": "alien", "content": "x"}], "hi", [["user", "x"]]):
        for streamed in (False, True):
            assert_refused(ask(messages, stream=streamed))
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    for messages in ([assistant], [{"role": "tool", "content": "z", "tool_call_id": "c"}], [user, assistant] * 1000):
        reply = ask(messages)
        assert reply.status_code == 200 or assert_refused(reply)["message"]
    for messages, words in (
        ([{"role": "system", "content": "s"}, user], "system turns are not for this model"),
        ([user, user], "turns must alternate"),
    ):
        if kind == "strict":
            assert words in assert_refused(ask(messages), code="chat_template_error")["message"]
        else:
            assert ask(messages).status_code == 200


def test_row_10_a_tool_turn_without_content_is_one_prompt(served: tuple[str, Live, Any]) -> None:
    _, server, reference = served
    base = server.server.base
    chats = [
        [{"role": "user", "content": "q"}, _turn({"city": "Köln"}, **content), {"role": "tool", "content": "12", "tool_call_id": "c1"}]
        for content in ({}, {"content": None}, {"content": ""})
    ]
    prompts = [ids(base, chat) for chat in chats]
    assert prompts[0] == prompts[1] == prompts[2]
    text = reference.decode(prompts[0])
    assert "<call>f" in text
    assert "Köln" in text
    assert "None" not in text
    assert "null" not in text
    assert len({whole(base, CHAT, {"messages": chat, "max_tokens": 1})["usage"]["prompt_tokens"] for chat in chats}) == 1


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_row_12_parts_are_the_string_they_spell(served: tuple[str, Live, Any], role: str) -> None:
    kind, server, reference = served
    base = server.server.base
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    if kind == "strict" and role == "system":
        return  # this template takes no system turn at all
    as_string, as_parts = ids(base, chat_of(role, "AB")), ids(base, chat_of(role, parts))
    assert as_string == as_parts
    text = reference.decode(as_string)
    assert f"[{role}]AB" in text
    assert "[{'" not in text
    for part in ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}, {"type": "hologram"}, {"type": "text"}, None):
        assert_refused(post(base, CHAT, {"messages": chat_of(role, [parts[0], part])}), status=(400, 501))


def test_row_14_exactly_as_many_bos_as_the_reference(served: tuple[str, Live, Any]) -> None:
    kind, server, reference = served
    base = server.server.base
    chat = [{"role": "user", "content": "hi <|im_start|> there"}]
    wanted = reference.apply_chat_template(_for_reference(kind, chat), tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids(base, chat) == wanted
    reply = whole(base, CHAT, {"messages": chat, "max_tokens": 1, "return_token_ids": True})
    assert reply["prompt_token_ids"] == wanted
    raw = reference.encode("hi there")
    assert whole(base, PLAIN, {"prompt": "hi there", "max_tokens": 1, "return_token_ids": True})["choices"][0]["prompt_token_ids"] == raw
    assert raw.count(reference.bos_token_id) == (kind != "strict")


@pytest.mark.parametrize("add_bos", [True, False])
def test_row_14_a_gguf_file_decides_for_itself(folders: dict[str, Path], tmp_path: Path, add_bos: bool) -> None:
    """Template with BOS: once in a chat, whatever the flag; the flag is for raw prompts."""
    path = write_gguf(folders["parts"], tmp_path / "m.gguf", metadata={"tokenizer.chat_template": PARTS})
    raw = path.read_bytes()
    key = b"tokenizer.ggml.add_bos_token"
    at = raw.index(key) + len(key) + 4
    path.write_bytes(raw[:at] + bytes([add_bos]) + raw[at + 1 :])
    reference = AutoTokenizer.from_pretrained(folders["parts"])
    with live(path, *tiny_flags(pool=1024), check=False) as server:
        base = server.server.base
        chat = [{"role": "user", "content": "hi"}]
        wanted = reference.apply_chat_template(_for_reference("parts", chat), tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ids(base, chat) == wanted
        plain = reference.encode("hi", add_special_tokens=False)
        found = whole(base, PLAIN, {"prompt": "hi", "max_tokens": 1, "return_token_ids": True})["choices"][0]["prompt_token_ids"]
        assert found == ([reference.bos_token_id] if add_bos else []) + plain


def _for_reference(kind: str, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat as this template wants it from someone who knows it: parts or strings, arguments decoded, content never null."""
    out = []
    for message in chat:
        made = dict(message)
        text = made.get("content") or ""
        made["content"] = [{"type": "text", "text": text}] if kind == "parts" and text else text
        if "tool_calls" in made:
            calls = [{**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}} for c in made["tool_calls"]]
            made["tool_calls"] = calls
        out.append(made)
    return out


ARGUMENTS: list[dict[str, Any]] = [
    {"q": 'say "hi" \\ back'},
    {"a": {"b": [1, 2, {"c": None}]}},
    {"城市": "北京", "x": "é😀"},
    {},
    {"n": 1.5, "t": True},
]


def test_row_15_five_turns_render_as_the_reference_does(served: tuple[str, Live, Any]) -> None:
    kind, server, reference = served
    chat: list[dict[str, Any]] = []
    for k, arguments in enumerate(ARGUMENTS):
        chat += [{"role": "user", "content": f"q{k}"}, _turn(arguments), {"role": "tool", "content": f"r{k}", "tool_call_id": "c1"}]
        chat += [{"role": "assistant", "content": f"a{k}"}]
        wanted = reference.apply_chat_template(_for_reference(kind, chat), tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ids(server.server.base, chat) == wanted
    same: list[dict[str, Any]] = []
    for _ in range(5):
        same += [{"role": "user", "content": "q"}, _turn(ARGUMENTS[0]), {"role": "tool", "content": "r", "tool_call_id": "c1"}]
        same += [{"role": "assistant", "content": "a"}]
    text = reference.decode(ids(server.server.base, same, add_generation_prompt=False)).removeprefix(reference.bos_token)
    assert text == text[: len(text) // 5] * 5


@pytest.mark.parametrize("wire", ["", "{broken", "5", '"text"', "[1]", "null", '{"a":1}{'])
def test_row_15_odd_arguments_are_answered_or_refused(served: tuple[str, Live, Any], wire: str) -> None:
    _, server, _ = served
    chat = [{"role": "user", "content": "q"}, _turn(wire), {"role": "tool", "content": "r", "tool_call_id": "c1"}]
    reply = post(server.server.base, CHAT, {"messages": chat, "max_tokens": 1})
    if reply.status_code != 200:
        assert_refused(reply)
    elif wire.startswith("{b"):
        assert "{broken" in post(server.server.base, "/detokenize", {"tokens": ids(server.server.base, chat)}).json()["text"]
