"""Rows of the public fault table that are about the engine's output, as far as the dialects must keep it intact."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from fixtures.asgi import events, post
from fixtures.fake_manager import FakeManager, Script, config
from rootlet.core.types import Finish, FinishKind
from rootlet.server.app import build_app

USER = [{"role": "user", "content": "x"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "x"})]


def text_of(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else choice.get("delta", choice.get("message"))["content"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_row_01_joined_deltas_are_the_reply_byte_for_byte(path: str, body: dict[str, Any]) -> None:
    text = "我很好🧑‍🚀🏳️‍🌈é́ไทย가"
    app = build_app(FakeManager([Script(tuple(text))]), config())
    whole = text_of(post(app, path, body).json()["choices"][0])
    deltas = [c["choices"][0] for c in events(post(app, path, {**body, "stream": True}))]
    assert "".join(text_of(c) for c in deltas if c.get("delta") != {}) == whole == text


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_row_02_nothing_is_sent_while_text_is_held_back(path: str, body: dict[str, Any]) -> None:
    script = Script(("plan ", "", "", "Con", "dor ", ""), finish=Finish(FinishKind.STOP, "Conclusion"), eos_token=False)
    app = build_app(FakeManager([script]), config())
    choices = [c["choices"][0] for c in events(post(app, path, {**body, "stream": True, "stop": ["Conclusion", "Con:"]}))]
    texts = [text_of(c) for c in choices if c.get("delta") != {} and c["finish_reason"] is None and "role" not in c.get("delta", {})]
    assert texts == ["plan ", "Con", "dor "]
    assert choices[-1]["stop_reason"] == "Conclusion"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_row_03_broken_bytes_are_strict_json_with_replacements(path: str, body: dict[str, Any], stream: bool) -> None:
    manager = FakeManager([Script(("ok\ufffd", "\ufffd\x00\x1f\u2028"))])
    app = build_app(manager, config())
    extra = {"logprobs": True, "top_logprobs": 3} if "messages" in body else {"logprobs": 3, "echo": True}
    response = post(app, path, {**body, **extra, "stream": stream})
    assert response.status_code == 200
    response.content.decode("utf-8")
    if stream:
        assert events(response)
    else:
        orjson.loads(response.content)


def test_row_14_chat_leaves_bos_to_the_template_and_raw_prompts_to_the_tokenizer() -> None:
    manager = FakeManager(add_bos=True)
    app = build_app(manager, config())
    chat, raw = (post(app, path, {**body, "return_token_ids": True}).json() for path, body in ROUTES)
    assert chat["prompt_token_ids"] == list(b"<user>x<assistant>")
    assert raw["choices"][0]["prompt_token_ids"] == [257, ord("x")]
    post(app, "/v1/completions", {"prompt": "x", "add_special_tokens": False})
    assert manager.requests[-1].add_special_tokens is False


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_row_22_biases_reach_the_engine_on_every_route(path: str, body: dict[str, Any], stream: bool) -> None:
    manager = FakeManager()
    app = build_app(manager, config())
    post(app, path, {**body, "logit_bias": {"7": -100, "9": 100}, "stream": stream})
    post(app, "/generate", {"text": "x", "sampling_params": {"logit_bias": {"7": -100, "9": 100}}, "stream": stream})
    assert [r.sampling.logit_bias for r in manager.requests] == [{7: -100.0, 9: 100.0}] * 2
