"""What one request may make the server do for it: lists that nothing else bounds have a bound, and work that goes over single tokens runs beside the
event loop, where it holds up nobody's stream."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fixtures.asgi import error, post
from fixtures.fake_manager import VOCAB, FakeManager, config
from rootlet.core.errors import InvalidValue
from rootlet.core.sampling_params import SamplingParams, validate
from rootlet.frontend.tokenizer_manager import INLINE_CHARS
from rootlet.server import messages, tokenize
from rootlet.server.app import build_app

MANY = INLINE_CHARS + 1


def app_of() -> tuple[Any, FakeManager]:
    manager = FakeManager(ctx_len=64)
    return build_app(manager, config()), manager


@pytest.mark.parametrize("body", [{"prompt": "abcd"}, {"text": "abcd"}, {"content": "abcd"}, {"prompt": ["ab", "cd"]}, {"prompt": ["", "", "abcd"]}])
def test_texts_to_tokenize_are_bounded_together(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = app_of()
    monkeypatch.setattr(tokenize, "MAX_CHARS", 4)
    assert post(app, "/tokenize", body).status_code == 200
    monkeypatch.setattr(tokenize, "MAX_CHARS", 3)
    for _ in range(2):
        assert "at most 3 " in error(post(app, "/tokenize", body), 413, code="request_too_large")["message"]


def test_a_rendered_conversation_is_bounded_as_a_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = app_of()
    monkeypatch.setattr(tokenize, "MAX_CHARS", 3)
    error(post(app, "/tokenize", {"messages": [{"role": "user", "content": "q"}]}), 413)


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1, 2, 3, 4]]])
def test_ids_to_detokenize_are_bounded_together(tokens: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = app_of()
    monkeypatch.setattr(tokenize, "MAX_IDS", 4)
    assert post(app, "/detokenize", {"tokens": tokens}).status_code == 200
    monkeypatch.setattr(tokenize, "MAX_IDS", 3)
    assert "at most 3 " in error(post(app, "/detokenize", {"tokens": tokens}), 413)["message"]


def test_lists_to_detokenize_are_as_many_as_texts_to_tokenize() -> None:
    app, _ = app_of()
    assert post(app, "/detokenize", {"tokens": [[97]] * 1024}).json()["text"] == ["a"] * 1024
    error(post(app, "/detokenize", {"tokens": [[97]] * 1025}), 400, param="tokens")


@pytest.mark.parametrize(("path", "body", "names"), [
    ("/tokenize", {"prompt": "a" * MANY, "return_token_strs": True}, {"encode", "id_to_token"}),
    ("/tokenize", {"prompt": ["a" * 1000] * (MANY // 1000 + 1)}, {"encode"}),
    ("/tokenize", {"content": "a" * MANY, "with_pieces": True}, {"encode", "token_bytes"}),
    ("/detokenize", {"tokens": [97] * MANY}, {"decode"}),
    ("/detokenize", {"tokens": [[97] * (MANY // 8)] * 9}, {"decode"}),
])  # fmt: skip
def test_work_on_many_tokens_is_done_beside_the_event_loop(path: str, body: Any, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    app, manager = app_of()
    inline: dict[str, set[bool]] = {}

    def watched(name: str) -> Any:
        plain = getattr(manager.tokenizer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            inline.setdefault(name, set()).add(threading.current_thread() is threading.main_thread())
            return plain(*args, **kwargs)

        return call

    for name in ("encode", "decode", "token_bytes", "id_to_token"):
        monkeypatch.setattr(manager.tokenizer, name, watched(name))
    assert post(app, path, body).status_code == 200
    assert {name: inline.get(name) for name in names} == {name: {False} for name in names}


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_more_ids_than_the_vocabulary_has_are_refused_before_they_are_looked_at(field: str) -> None:
    """Every step would go over them, for all rows of its batch."""
    app, manager = app_of()
    if field == "logit_bias":
        all_ids: Any = {str(i): 0 for i in range(VOCAB)}
        too_many: Any = {**all_ids, "no id": None}
    else:
        all_ids, too_many = list(range(VOCAB)), [*range(VOCAB), "no id"]
    for path, wrap, prefix in (("/v1/completions", lambda f: f, ""), ("/generate", lambda f: {"sampling_params": f}, "sampling_params.")):
        prompt = {"prompt": "a"} if path != "/generate" else {"text": "a"}
        assert post(app, path, {**prompt, **wrap({field: all_ids})}).status_code == 200
        found = error(post(app, path, {**prompt, **wrap({field: too_many})}), 400, param=prefix + field)
        assert f"holds {VOCAB + 1} token ids" in found["message"]
    assert len(manager.requests) == 2


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_the_python_api_has_the_same_bound(field: str) -> None:
    validate(SamplingParams(**{field: (1, 1)}), 2, max_n=1)
    with pytest.raises(InvalidValue, match="holds 3 token ids, more than the vocabulary of 2"):
        validate(SamplingParams(**{field: (1, 1, 1)}), 2, max_n=1)


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = app_of()
    monkeypatch.setattr(messages, "MAX_TOOLS", 2)
    tool: dict[str, Any] = {"name": "f"} if name == "functions" else {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "q"}]}
    assert post(app, "/v1/chat/completions", {**body, name: [tool] * 2}).status_code == 200
    error(post(app, "/v1/chat/completions", {**body, name: [tool, tool, "no tool"]}), 400, param=name)


def test_a_prefix_to_pin_is_no_longer_than_a_prompt_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it is tokenized, and before its ids are looked at."""
    app, manager = app_of()
    assert post(app, "/cache/pin", {"input_ids": [1] * 63}).status_code == 200
    error(post(app, "/cache/pin", {"input_ids": [VOCAB] * 64}), 400, code="context_length_exceeded", param="input_ids")
    monkeypatch.setattr(manager.tokenizer, "min_tokens", len)
    monkeypatch.setattr(manager.tokenizer, "encode", None)
    error(post(app, "/cache/pin", {"text": "a" * 64}), 400, code="context_length_exceeded", param="text")
