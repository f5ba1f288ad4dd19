"""`/v1/completions` over recorded events: prompts in all spellings, echo, the legacy logprobs, batches and their order."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from fixtures.asgi import error, events, post
from fixtures.fake_manager import BOS, EOS, FakeManager, Script, config
from rootlet.config.schema import SchedulerArgs
from rootlet.core.errors import QueueFull
from rootlet.core.types import Finish, FinishKind
from rootlet.server.app import build_app

PATH = "/v1/completions"


def app_of(*scripts: Script, **options: Any) -> tuple[Any, FakeManager]:
    manager = FakeManager(scripts or (Script(),), **options)
    return build_app(manager, config()), manager


def test_a_reply_has_every_field_and_the_default_length() -> None:
    app, manager = app_of()
    body = post(app, PATH, {"prompt": "hey"}).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": EOS, "matched_stop": EOS, "seed": 77}
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert manager.requests[0].sampling.max_new_tokens == 16


def test_row_27_lists_of_lists_give_one_choice_each_in_order() -> None:
    app, manager = app_of(Script(("a",)), Script(("b",)))
    body = post(app, PATH, {"prompt": [[1, 2], [3]], "n": 2}).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert sorted(r.input_ids or () for r in manager.requests) == [(1, 2), (3,)]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 2 * 4
    assert len({r.rid for r in manager.requests}) == 2


@pytest.mark.parametrize(("prompt", "param"), [
    ([258], "prompt[0]"), ([-1], "prompt[0]"), ([2**31], "prompt[0]"), ([2**63], "prompt[0]"), ([2**70], "prompt[0]"), ([1.5], "prompt[0]"),
    ([True], "prompt[0]"), ([1, "1"], "prompt[1]"), ([[1], "a"], "prompt[1]"), (["a", [1]], "prompt[1]"), ([[1, 2], [300]], "prompt[1][0]"),
    (5, "prompt"), ({}, "prompt"), ([None], "prompt[0]"),
])  # fmt: skip
def test_row_27_ids_out_of_range_and_mixed_lists_are_400(prompt: Any, param: str) -> None:
    app, manager = app_of()
    error(post(app, PATH, {"prompt": prompt}), 400, param=param)
    assert manager.requests == []


def test_row_27_the_last_id_is_in_range_and_equals_its_text() -> None:
    app, _ = app_of()
    assert post(app, PATH, {"prompt": [257]}).status_code == 200
    by_ids = post(app, PATH, {"prompt": list(b"hey"), "echo": True}).json()
    by_text = post(app, PATH, {"prompt": "hey", "echo": True}).json()
    assert by_ids["choices"] == by_text["choices"]


@pytest.mark.parametrize(("prompt", "param"), [("", "prompt"), ([""], "prompt[0]"), ([], "prompt"), ([[]], "prompt[0]"), (["a", ""], "prompt[1]")])
def test_row_26_prompts_without_a_token_are_400_and_name_the_item(prompt: Any, param: str) -> None:
    app, manager = app_of()
    error(post(app, PATH, {"prompt": prompt}), 400, param=param)
    assert manager.requests == []


def test_row_26_absent_and_null_prompts_are_400_and_a_bos_is_enough() -> None:
    app, _ = app_of()
    error(post(app, PATH, {}), 400, param="prompt")
    error(post(app, PATH, {"prompt": None}), 400, param="prompt")
    app, manager = app_of(add_bos=True)
    assert post(app, PATH, {"prompt": ""}).status_code == 200
    assert manager.requests[0].input_ids == (BOS,)


def test_row_24_too_many_prompts_are_refused_at_once_before_any_work() -> None:
    app, manager = app_of()
    start_s = time.process_time()
    body = error(post(app, PATH, {"prompt": ["a"] * 50_000}), 400, param="prompt")
    assert "1024" in body["message"]
    error(post(app, PATH, {"prompt": [[1]] * 513, "n": 2}), 400, param="prompt")
    assert time.process_time() - start_s < 1.0
    assert manager.requests == []


@pytest.mark.parametrize(("path", "body"), [
    (PATH, {"prompt": ["a"] * 6, "n": 2}), (PATH, {"prompt": [[1]] * 11}), ("/generate", {"text": ["a"] * 11}),
    ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 9}, {"n": 2}]}),
])  # fmt: skip
def test_more_prompts_than_may_ever_be_open_are_refused_for_good(path: str, body: dict[str, Any]) -> None:
    """8 rows and 2 places to wait: a 503 would invite the client to try again, for ever."""
    manager = FakeManager()
    app = build_app(manager, replace(config(), scheduler=SchedulerArgs(max_queue=2)))
    refused = error(post(app, path, body), 400, param="text" if path == "/generate" else "prompt")
    assert "at most 10 may run and wait" in refused["message"]
    assert "--max-queue" in refused["message"]
    assert manager.requests == []
    assert post(app, path, {**body, "n": 1, "sampling_params": {}, "prompt": ["a"] * 10, "text": ["a"] * 10}).status_code == 200
    assert len(manager.requests) == 10


def test_row_32_one_prompt_of_a_batch_beyond_the_context_refuses_all_with_both_numbers() -> None:
    app, manager = app_of()
    body = error(post(app, PATH, {"prompt": [[1], [2], [3] * 300, [4]], "stream": True}), 400, code="context_length_exceeded", param="prompt[2]")
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (300, 256)
    assert "256" in body["message"]
    assert "300" in body["message"]
    assert manager.requests == []
    for prompt in ([1] * 256, "x" * 256):
        error(post(app, PATH, {"prompt": prompt, "stream": True}), 400, code="context_length_exceeded", param="prompt")
    assert post(app, PATH, {"prompt": [1] * 255}).status_code == 200


def test_a_batch_whose_second_prompt_is_refused_by_the_engine_fails_whole_and_closes_the_others() -> None:
    app, manager = app_of()
    manager.refuse = lambda req: QueueFull("the queue is full", retry_after_s=2.5) if req.input_ids == (2,) else None
    response = post(app, PATH, {"prompt": [[1], [2], [3]]})
    error(response, 503, code="queue_full")
    assert response.headers["retry-after"] == "3"
    assert response.headers["retry-after-ms"] == "2500"
    assert manager.running == 0


def test_row_29_echo_with_logprobs_covers_every_token_and_joins_to_the_text() -> None:
    for add_bos in (False, True):
        app, _ = app_of(Script(("wé", "🧑!")), add_bos=add_bos)
        for prompt in ("plain", "né à ไทย", "<eos>x"):
            body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 5}
            reply = post(app, PATH, body).json()
            choice = reply["choices"][0]
            logprobs = choice["logprobs"]
            assert choice["text"] == prompt + "wé🧑!"
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert len(logprobs["token_logprobs"]) == reply["usage"]["total_tokens"]
            assert [p is None for p in logprobs["token_logprobs"]] == [True] + [False] * (reply["usage"]["total_tokens"] - 1)
            for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
                assert choice["text"][offset : offset + len(token)] == token
            assert logprobs["top_logprobs"][0] is None
            assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))
            streamed = [c["choices"][0] for c in events(post(app, PATH, {**body, "stream": True}))]
            assert "".join(c["text"] for c in streamed) == choice["text"]
            for key, values in logprobs.items():
                assert [v for c in streamed if c["logprobs"] for v in c["logprobs"][key]] == values, key


def test_row_30_minus_infinity_becomes_the_documented_floor() -> None:
    app, _ = app_of(Script(("ab",), logprob=float("-inf")))
    response = post(app, PATH, {"prompt": "x", "logprobs": 1})
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 3
    chat = post(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "stream": True})
    assert "Infinity" not in chat.text
    assert "NaN" not in chat.text
    assert events(chat)[1]["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_echo_with_no_new_tokens_scores_the_prompt() -> None:
    app, manager = app_of()
    body = {"prompt": "hey", "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = post(app, PATH, body).json()["choices"][0]
    assert choice["text"] == "hey"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert manager.requests[0].logprobs is not None
    assert manager.requests[0].logprobs.prompt_start == 0
    streamed = events(post(app, PATH, {**body, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in streamed) == "hey"
    error(post(app, PATH, {"prompt": "hey", "max_tokens": 0}), 400, param="max_tokens")


def test_echo_with_logprobs_and_n_gives_the_prompt_to_every_choice_in_a_stream_too() -> None:
    app, _ = app_of(Script(("a",)), Script(("b",)))
    body = {"prompt": ["hi", "yo"], "echo": True, "logprobs": 1, "n": 2}
    whole = post(app, PATH, body).json()["choices"]
    streamed = [c["choices"][0] for c in events(post(app, PATH, {**body, "stream": True}))]
    for choice in whole:
        mine = [c for c in streamed if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [t for c in mine if c["logprobs"] for t in c["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


def test_a_stop_string_cuts_the_logprobs_with_the_text() -> None:
    script = Script(("ab", "c"), finish=Finish(FinishKind.STOP, "STOP"), eos_token=False)
    app, manager = app_of(script)
    inner = manager.generate

    async def with_stop(req: Any) -> Any:
        from msgspec.structs import replace

        from fixtures.fake_manager import logprob

        async for chunk in inner(req):
            extra = tuple(logprob(i, -0.1, 1) for i in b"STOP") if chunk.finish else ()
            yield replace(chunk, logprobs=chunk.logprobs + extra)

    manager.generate = with_stop  # type: ignore[method-assign]
    choice = post(app, PATH, {"prompt": "x", "logprobs": 1, "stop": "STOP"}).json()["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["stop_reason"] == "STOP"


def test_row_07_each_index_ends_once_and_usage_equals_the_reply() -> None:
    scripts = (Script(("a", "b", "c")), Script(("a",), finish=Finish(FinishKind.LENGTH)), Script(("q",), finish=Finish(FinishKind.STOP, "s")))
    app, _ = app_of(*scripts)
    for path, prompt in ((PATH, {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
        body = {**prompt, "n": 3, "seed": 1}
        whole = post(app, path, body).json()
        chunks = events(post(app, path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
        ends = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
        assert sorted(ends) == [(0, "stop"), (1, "length"), (2, "stop")]
        for index in range(3):
            mine = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
            assert mine[-1] is not None
            assert mine.count(None) == len(mine) - 1
        assert [c for c in chunks if not c["choices"]] == [chunks[-1]]
        assert chunks[-1]["usage"] == whole["usage"]


def test_extensions_of_completions() -> None:
    app, _ = app_of()
    body = {"prompt": "hi", "return_token_ids": True, "prompt_logprobs": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    choice = post(app, PATH, body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [104, 105]
    assert choice["token_ids"] == [*b"Hello", EOS]
    assert choice["logprobs"]["tokens"][0] == "token_id:72"
    assert choice["prompt_logprobs"][1]["105"]["rank"] == 1
    streamed = [c["choices"][0] for c in events(post(app, PATH, {**body, "stream": True}))]
    assert [i for c in streamed for i in c["token_ids"]] == choice["token_ids"]
    assert streamed[0]["prompt_token_ids"] == [104, 105]
    assert streamed[0]["prompt_logprobs"] == choice["prompt_logprobs"]
    error(post(app, PATH, {"prompt": "x", "suffix": "y"}), 501, param="suffix")
    assert post(app, PATH, {"prompt": "x", "suffix": ""}).status_code == 200
