"""`/generate` as SGLang's clients read it; `/tokenize` and `/detokenize` in their three spellings."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.asgi import call, error, events, post
from fixtures.fake_manager import BOS, EOS, FakeManager, Script, config
from rootlet.core.types import Finish, FinishKind
from rootlet.server.app import build_app


def app_of(*scripts: Script, **options: Any) -> tuple[Any, FakeManager]:
    manager = FakeManager(scripts or (Script(),), **options)
    return build_app(manager, config()), manager


def test_one_prompt_gives_one_object_with_meta_info() -> None:
    app, manager = app_of()
    body = post(app, "/generate", {"text": "hey", "rid": "r1", "sampling_params": {"temperature": 0}}).json()
    assert (body["text"], body["output_ids"]) == ("Hello", [*b"Hello", EOS])
    assert body["meta_info"] == {
        "id": "r1", "finish_reason": {"type": "stop", "matched": EOS}, "prompt_tokens": 3, "completion_tokens": 6, "cached_tokens": 3,
        "cached_tokens_details": {"device": 3, "host": 0, "storage": 0}, "reasoning_tokens": 0, "weight_version": "default", "seed": 77,
        "e2e_latency": 1.5, "queue_time": 0.25, "first_token_latency": 0.5, "decode_throughput": 5.0, "num_retractions": 1,
    }  # fmt: skip
    assert manager.requests[0].sampling.max_new_tokens == 128
    assert call(app, "PUT", "/generate", json={"text": "x"}).status_code == 200


def test_a_batch_gives_a_list_in_order_with_parameters_of_its_own() -> None:
    app, manager = app_of(Script(("a",)), Script(("b",)))
    body = {"text": ["p", "q"], "sampling_params": [{"n": 2, "max_new_tokens": 3}, {"n": 1, "temperature": 0.5}], "rid": ["x", "y"]}
    items = post(app, "/generate", body).json()
    assert [(i["text"], i["meta_info"]["id"]) for i in items] == [("a", "x"), ("b", "x"), ("a", "y")]
    assert sorted((r.rid, r.sampling.n, r.sampling.temperature) for r in manager.requests) == [("x", 2, 1.0), ("y", 1, 0.5)]
    assert len(post(app, "/generate", {"text": ["one"]}).json()) == 1
    assert len(post(app, "/generate", {"text": "one", "sampling_params": {"n": 2}}).json()) == 2


def test_streams_carry_the_whole_text_so_far_or_deltas_when_asked() -> None:
    app, _ = app_of(Script(("a", "b"), finish=Finish(FinishKind.LENGTH)))
    chunks = events(post(app, "/generate", {"text": "x", "stream": True}))
    assert [c["text"] for c in chunks] == ["a", "ab", "ab"]
    assert chunks[-1]["output_ids"] == [97, 98]
    assert [c["meta_info"]["finish_reason"] for c in chunks] == [None, None, {"type": "length", "length": 2}]
    assert "index" not in chunks[0]
    deltas = events(post(app, "/generate", {"text": "x", "stream": True, "incremental": True}))
    assert "".join(c["text"] for c in deltas) == "ab"
    batch = events(post(app, "/generate", {"text": ["x", "y"], "stream": True, "sampling_params": {"n": 2}}))
    assert sorted({c["index"] for c in batch}) == [0, 1, 2, 3]


def test_logprobs_are_triples_and_the_input_begins_with_null() -> None:
    app, _ = app_of(Script(("a",)))
    body = {"text": "hi", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = post(app, "/generate", body).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 104, "h"], [-1.0, 105, "i"]]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, EOS, "<eos>"]]
    assert meta["input_top_logprobs"] == [None, [[-1.0, 105, "i"]]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"]]
    assert meta["output_token_logprobs_length"] == 2
    plain = post(app, "/generate", {"text": "hi", "return_logprob": True}).json()["meta_info"]
    assert plain["input_token_logprobs"] == []
    assert plain["output_token_logprobs"][0] == [-0.5, 97, None]
    assert "output_top_logprobs" not in plain


@pytest.mark.parametrize("body", [
    {}, {"text": "a", "input_ids": [1]}, {"text": 5}, {"text": []}, {"text": [1]}, {"text": ["a", 5]}, {"text": ""}, {"input_ids": []},
    {"input_ids": [[]]}, {"input_ids": "a"}, {"input_ids": ["a"]}, {"input_ids": [258]}, {"input_ids": [True]}, {"input_ids": [1.5]},
    {"text": "a", "sampling_params": []}, {"text": ["a", "b"], "sampling_params": [{}]}, {"text": "a", "sampling_params": "x"},
    {"text": ["a", "b"], "rid": ["x", "x"]}, {"text": "a", "rid": 5}, {"text": "a", "top_logprobs_num": 2},
    {"text": "a", "return_logprob": 1}, {"text": "a", "return_logprob": True, "logprob_start_len": -2}, {"text": "a", "stream": "yes"},
])  # fmt: skip
def test_row_26_27_bad_native_requests_are_400_in_the_same_envelope(body: Any) -> None:
    app, manager = app_of()
    error(post(app, "/generate", body), 400)
    assert manager.requests == []


@pytest.mark.parametrize("body", [
    {"text": "a", "sampling_params": {"json_schema": "{}"}}, {"text": "a", "sampling_params": {"regex": "a"}}, {"text": "a",
    "token_ids_logprob": [1]},
    {"text": "a", "lora_path": "x"}, {"text": "a", "image_data": "x"}, {"text": "a", "session_params": {"id": 1}},
])  # fmt: skip
def test_what_is_not_there_is_501(body: Any) -> None:
    app, _ = app_of()
    assert post(app, "/generate", body).headers["x-should-retry"] == "false"
    error(post(app, "/generate", body), 501)


def test_zero_new_tokens_only_fills_the_cache() -> None:
    app, _ = app_of()
    body = post(app, "/generate", {"text": "hey", "sampling_params": {"max_new_tokens": 0}}).json()
    assert (body["text"], body["meta_info"]["completion_tokens"]) == ("", 0)
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_failures_inside_are_errors_here_too() -> None:
    nan = Finish(FinishKind.ERROR, status=500, message="not finite")
    app, _ = app_of(Script(("a",), finish=nan))
    error(post(app, "/generate", {"text": "x"}), 500)
    assert events(post(app, "/generate", {"text": "x", "stream": True}))[-1]["error"]["message"] == "not finite"


def test_tokenize_speaks_three_dialects() -> None:
    app, _ = app_of(add_bos=True)
    assert post(app, "/tokenize", {"prompt": "hé"}).json() == {"tokens": [BOS, 104, 195, 169], "count": 4, "max_model_len": 256}
    assert post(app, "/tokenize", {"text": "h", "add_special_tokens": False, "return_token_strs": True}).json()["token_strs"] == ["h"]
    assert post(app, "/tokenize", {"prompt": ["h", "ij"], "add_special_tokens": False}).json()["tokens"] == [[104], [105, 106]]
    assert post(app, "/tokenize", {"content": "h"}).json() == {"tokens": [104]}
    pieces = post(app, "/tokenize", {"content": "hé", "with_pieces": True, "add_special": True}).json()["tokens"]
    assert pieces == [{"id": BOS, "piece": "<bos>"}, {"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    chat = post(app, "/tokenize", {"messages": [{"role": "user", "content": "q"}]}).json()
    assert bytes(chat["tokens"]) == b"<user>q<assistant>"
    for bad in ({}, {"prompt": 5}, {"prompt": [5]}, {"content": []}, {"messages": []}, {"prompt": ["a"] * 2000}):
        error(post(app, "/tokenize", bad), 400)


def test_detokenize_answers_under_every_key() -> None:
    app, _ = app_of()
    assert post(app, "/detokenize", {"tokens": [104, 105, EOS]}).json() == dict.fromkeys(("text", "prompt", "content"), "hi<eos>")
    assert post(app, "/detokenize", {"tokens": [104, EOS], "skip_special_tokens": True}).json()["text"] == "h"
    assert post(app, "/detokenize", {"tokens": [[104], [105]]}).json()["text"] == ["h", "i"]
    assert post(app, "/detokenize", {"tokens": []}).json()["text"] == ""
    for bad in (
        {},
        {"tokens": 5},
        {"tokens": [258]},
        {"tokens": [-1]},
        {"tokens": [True]},
        {"tokens": [[1], 2]},
        {"tokens": ["a"]},
        {"tokens": [2**63]},
    ):
        error(post(app, "/detokenize", bad), 400)
