"""`/v1/chat/completions` over recorded events: the reply, the stream, what is refused. Rows of the public bug-report table are named in the tests."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fixtures.asgi import error, events, post
from fixtures.fake_manager import FakeManager, Script, config
from rootlet.core.types import Finish, FinishKind
from rootlet.server.app import build_app

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def app_of(*scripts: Script, manager: FakeManager | None = None, **server: Any) -> tuple[Any, FakeManager]:
    manager = manager or FakeManager(scripts or (Script(),))
    return build_app(manager, config(**server)), manager


def test_a_reply_has_every_field_that_clients_read() -> None:
    app, manager = app_of()
    response = post(app, PATH, {"messages": HI, "model": "tiny", "seed": 5})
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert isinstance(body["created"], int)
    assert body["model"] == "tiny"
    assert body["system_fingerprint"].startswith("b")
    assert body["seed"] == 5
    assert body["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": None}, "logprobs": None, "finish_reason": "stop",
            "stop_reason": 256, "matched_stop": 256,
        }
    ]  # fmt: skip
    assert body["usage"] == {
        "prompt_tokens": 19, "completion_tokens": 6, "total_tokens": 25, "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0}, "cached_tokens_details": {"device": 4, "host": 0, "storage": 0},
    }  # fmt: skip
    assert manager.requests[0].prompt == "<user>hi<assistant>"
    assert manager.requests[0].add_special_tokens is False
    assert manager.requests[0].rid == body["id"]
    assert manager.requests[0].sampling.max_new_tokens is None


def test_the_roles_come_first_and_each_choice_ends_with_an_empty_delta() -> None:
    app, _ = app_of(Script(("a", "", "b")), Script(("x",), finish=Finish(FinishKind.LENGTH)))
    chunks = events(post(app, PATH, {"messages": HI, "stream": True, "n": 2, "stream_options": {"include_usage": True}}))
    deltas = [(c["index"], c["delta"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]]
    role = {"role": "assistant", "content": ""}
    assert deltas[:2] == [(0, role, None), (1, role, None)]
    assert [d for d in deltas[2:] if d[0] == 0] == [(0, {"content": "a"}, None), (0, {"content": "b"}, None), (0, {}, "stop")]
    assert [d for d in deltas[2:] if d[0] == 1] == [(1, {"content": "x"}, None), (1, {}, "length")]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3 + 1
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1


def test_usage_is_absent_unless_asked_for_and_continuous_only_with_it() -> None:
    app, _ = app_of()
    plain = events(post(app, PATH, {"messages": HI, "stream": True}))
    assert not any("usage" in chunk for chunk in plain)
    alone = events(post(app, PATH, {"messages": HI, "stream": True, "stream_options": {"continuous_usage_stats": True}}))
    assert not any("usage" in chunk for chunk in alone)
    options = {"include_usage": True, "continuous_usage_stats": True}
    both = events(post(app, PATH, {"messages": HI, "stream": True, "stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in both] == [3, 3, 5, 6, 6]
    assert post(app, PATH, {"messages": HI, "stream_options": {"include_usage": True}}).status_code == 200


def test_logprobs_of_stream_and_reply_are_equal_and_join_to_the_text() -> None:
    script = Script(("h", "é!", "🧑"))
    app, _ = app_of(script)
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    whole = post(app, PATH, body).json()["choices"][0]
    streamed = [e for c in events(post(app, PATH, {**body, "stream": True})) for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    assert whole["logprobs"]["content"] == streamed
    assert "".join(e["token"] for e in streamed) == whole["message"]["content"] == "hé!🧑"
    assert bytes(b for e in streamed for b in e["bytes"]).decode() == "hé!🧑"
    assert [len(e["top_logprobs"]) for e in streamed] == [2] * len(streamed)


def test_a_failure_before_the_first_token_is_a_status_and_afterwards_an_error_event() -> None:
    nan = Finish(FinishKind.ERROR, status=500, code="nan_logits", message="logits are not finite")
    app, _ = app_of(Script((), finish=nan))
    error(post(app, PATH, {"messages": HI, "stream": True}), 500, code="nan_logits")
    error(post(app, PATH, {"messages": HI}), 500, code="nan_logits")
    app, _ = app_of(Script(("a",), finish=nan))
    chunks = events(post(app, PATH, {"messages": HI, "stream": True}))
    assert chunks[-1]["error"]["message"] == "logits are not finite"
    assert chunks[-2]["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize(("finish", "status", "kind"), [
    (Finish(FinishKind.ABORT, message="aborted on request"), 499, "request_aborted"),
    (Finish(FinishKind.ERROR, status=504, code="deadline_exceeded", message="too late"), 504, "timeout_error"),
    (Finish(FinishKind.ERROR, status=503, code="shutting_down", message="bye"), 503, "unavailable_error"),
])  # fmt: skip
def test_abort_and_deadline_are_errors_never_finish_reasons(finish: Finish, status: int, kind: str) -> None:
    app, _ = app_of(Script(("part",), finish=finish))
    response = post(app, PATH, {"messages": HI})
    assert error(response, status)["type"] == kind
    assert response.headers.get("x-should-retry") == ("false" if status != 503 else None)
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), (None, "messages"), ("hi", "messages"), ([{}], "messages[0].role"), (["x"], "messages[0]"),
    ([{"role": "alien", "content": "x"}], "messages[0].role"), ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "tool", "content": "x", "tool_call_id": "c"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"), ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "messages"),
])  # fmt: skip
def test_row_09_conversations_that_do_not_fit_are_400_with_the_field_or_the_templates_words(messages: Any, param: str) -> None:
    app, _ = app_of()
    body = error(post(app, PATH, {"messages": messages}), 400, param=param)
    if param == "messages" and isinstance(messages, list) and messages:
        assert body["code"] == "chat_template_error"
        assert "must alternate" in body["message"]


def test_row_09_odd_but_renderable_conversations_are_answered() -> None:
    app, _ = app_of(manager=FakeManager(ctx_len=100_000))
    many = [{"role": role, "content": "x"} for _ in range(1000) for role in ("user", "assistant")]
    for messages in ([{"role": "assistant", "content": "a"}], [{"role": "system", "content": "s"}], many):
        assert post(app, PATH, {"messages": messages}).status_code == 200


def test_row_10_a_tool_turn_is_the_same_with_content_null_absent_and_empty() -> None:
    app, manager = app_of()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    counts = set()
    for content in ({}, {"content": None}, {"content": ""}):
        turn = {"role": "assistant", "tool_calls": [call], **content}
        result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
        messages = [{"role": "user", "content": "q"}, turn, result, {"role": "user", "content": "again"}]
        counts.add(post(app, PATH, {"messages": messages}).json()["usage"]["prompt_tokens"])
    assert len(counts) == 1
    assert all("None" not in (r.prompt or "") and "null" not in (r.prompt or "") for r in manager.requests)
    assert manager.chat_template.seen[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(("wire", "seen"), [
    ('{"a": {"b": "\\"x\\" 字"}}', {"a": {"b": '"x" 字'}}), ("{}", {}), ("", {}), (None, {}), ("{bad", "{bad"), ("5", 5), ({"k": 1}, {"k": 1}),
])  # fmt: skip
def test_row_15_tool_arguments_reach_the_template_decoded_once(wire: Any, seen: Any) -> None:
    app, manager = app_of()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": wire}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "r"}]
    assert post(app, PATH, {"messages": messages}).status_code == 200
    assert manager.chat_template.seen[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == seen


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_row_12_parts_render_as_the_string_they_spell(role: str) -> None:
    app, manager = app_of()
    for content in ("AB", [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], ["A", "B"]):
        assert post(app, PATH, {"messages": [{"role": role, "content": content}]}).status_code == 200
    assert {r.prompt for r in manager.requests} == {f"<{role}>AB<assistant>"}


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": "alien"}, {}, 5])
def test_row_12_parts_that_are_no_text_are_refused_by_their_type(part: Any) -> None:
    app, _ = app_of()
    body = error(post(app, PATH, {"messages": [{"role": "user", "content": [part]}]}), 400)
    assert isinstance(part, dict) is False or part.get("type", "") in body["message"]


def test_tools_are_rendered_with_auto_and_left_out_with_none() -> None:
    app, manager = app_of()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for choice, seen in ((None, [tool]), ("auto", [tool]), ("none", None)):
        assert post(app, PATH, {"messages": HI, "tools": [tool], "tool_choice": choice}).status_code == 200
        assert manager.chat_template.seen[-1]["tools"] == seen
    assert post(app, PATH, {"messages": HI, "functions": [{"name": "g"}]}).status_code == 200
    assert manager.chat_template.seen[-1]["tools"] == [{"type": "function", "function": {"name": "g"}}]


@pytest.mark.parametrize(("field", "value", "status"), [
    ("tool_choice", "required", 501), ("tool_choice", {"type": "function", "function": {"name": "f"}}, 501), ("tool_choice", "maybe", 400),
    ("tool_choice", 5, 400), ("tools", [{"type": "function"}], 400), ("tools", "x", 400), ("tools", [5], 400),
    ("response_format", {"type": "json_object"}, 501), ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, 501),
    ("response_format", {"type": "json_schema"}, 400), ("response_format", {}, 400), ("response_format", "json", 400),
    ("structured_outputs", {"regex": "a"}, 501), ("guided_json", {}, 400), ("guided_regex", "a", 400), ("regex", "a", 501),
    ("chat_template", "{{x}}", 501), ("chat_template_kwargs", {"messages": 1}, 400), ("modalities", ["audio"], 400), ("lora_path", "a", 501),
    ("function_call", {"name": "f"}, 501),
])  # fmt: skip
def test_what_cannot_be_enforced_is_refused_not_ignored(field: str, value: Any, status: int) -> None:
    app, manager = app_of()
    response = post(app, PATH, {"messages": HI, field: value})
    error(response, status)
    assert response.headers.get("x-should-retry") == ("false" if status == 501 else None)
    assert manager.requests == []


def test_template_variables_reach_the_template() -> None:
    app, manager = app_of()
    body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "add_generation_prompt": False}
    assert post(app, PATH, body).status_code == 200
    assert manager.chat_template.seen[0]["kwargs"] == {"enable_thinking": False, "reasoning_effort": "low"}
    assert manager.chat_template.seen[0]["add"] is False
    final = [*HI, {"role": "assistant", "content": "The"}]
    assert post(app, PATH, {"messages": final, "continue_final_message": True}).status_code == 200
    assert manager.chat_template.seen[1]["continue"] is True
    error(post(app, PATH, {"messages": HI, "continue_final_message": True}), 400, param="continue_final_message")
    error(post(app, PATH, {"messages": final, "continue_final_message": True, "add_generation_prompt": True}), 400)


def test_extensions_token_ids_and_prompt_logprobs() -> None:
    app, _ = app_of()
    body = {"messages": HI, "return_token_ids": True, "prompt_logprobs": 1}
    whole = post(app, PATH, body).json()
    assert whole["prompt_token_ids"] == list(b"<user>hi<assistant>")
    assert whole["choices"][0]["token_ids"] == [*b"Hello", 256]
    assert whole["choices"][0]["logprobs"] is None
    assert whole["prompt_logprobs"][0] is None
    assert whole["prompt_logprobs"][1] == {str(ord("u")): {"logprob": -1.0, "rank": 1, "decoded_token": "u"}}
    chunks = events(post(app, PATH, {**body, "stream": True}))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == whole["choices"][0]["token_ids"]
    assert [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c] == [whole["prompt_logprobs"]]


def test_the_models_sampling_defaults_lie_between_the_request_and_openais() -> None:
    manager = FakeManager()
    manager.sampling_defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    app, _ = app_of(manager=manager)
    post(app, PATH, {"messages": HI, "top_p": 0.5})
    assert (manager.requests[0].sampling.temperature, manager.requests[0].sampling.top_p, manager.requests[0].sampling.top_k) == (0.6, 0.5, 20)
    app, _ = app_of(manager=manager, sampling_defaults="openai")
    post(app, PATH, {"messages": HI})
    assert (manager.requests[1].sampling.temperature, manager.requests[1].sampling.top_k) == (1.0, 0)


def test_row_15_half_a_surrogate_in_tool_arguments_is_no_500() -> None:
    app, _ = app_of()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    assert post(app, PATH, {"messages": messages}).status_code in (200, 400)


@pytest.mark.parametrize(("more", "apart"), [
    ({}, False), ({"chat_template_kwargs": {"k": 1}}, False), ({"chat_template_kwargs": {"k": ["x" * 100] * 100}}, True),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "d" * 10_000}}]}, True),
    ({"messages": [{"role": "user", "content": "x" * 10_000}]}, True),
])  # fmt: skip
def test_row_89_what_takes_long_to_render_is_rendered_beside_the_loop(more: dict[str, Any], apart: bool) -> None:
    app, manager = app_of()
    manager.ready_info = None  # no length rule: only where the work is done
    threads: list[threading.Thread] = []
    inner = manager.chat_template.render

    def render(*args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread())
        return inner(*args, **kwargs)

    manager.chat_template.render = render  # type: ignore[method-assign]
    post(app, "/tokenize", {"messages": HI, **more})
    assert [thread is not threading.main_thread() for thread in threads] == [apart]
