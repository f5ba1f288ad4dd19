"""Every sampling parameter at its edges, on both dialects, straight through the parser and over HTTP."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fixtures.asgi import error, post
from fixtures.fake_manager import VOCAB, FakeManager, config
from rootlet.core.errors import InvalidValue, Unsupported
from rootlet.server.app import build_app
from rootlet.server.fields import Fields
from rootlet.server.sampling import Limits, MaxTokens, read_sampling

LENGTH = MaxTokens(names=("max_completion_tokens", "max_tokens"), default=16, zero_ok=False)
LIMITS = Limits(vocab_size=VOCAB, max_n=128, max_logprobs=20, max_temperature=2.0, recommended={})
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def read(**fields: Any) -> Any:
    return read_sampling(Fields(fields), LIMITS, LENGTH)


def test_defaults_are_openais() -> None:
    p = read()
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty, p.n, p.seed, p.max_new_tokens) == (1.0, 1.0, 0, 0.0, 1.0, 1, None, 16)


@pytest.mark.parametrize("name", [
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "stop",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "seed", "n", "best_of", "min_tokens", "max_tokens", "max_completion_tokens",
    "include_stop_str_in_output", "no_stop_trim", "guided_json", "structured_outputs",
])  # fmt: skip
def test_row_16_null_is_the_default(name: str) -> None:
    assert read(**{name: None}) == read()


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", '"0.7"', "true", "[]", "{}"])
def test_row_16_what_is_no_finite_number_is_400_naming_the_parameter(name: str, raw: str) -> None:
    app = build_app(FakeManager(), config())
    body = f'{{"prompt":"x","{name}":{raw}}}'.encode()
    assert name in error(post(app, "/v1/completions", body), 400, param=name)["message"]
    native = f'{{"text":"x","sampling_params":{{"{name}":{raw}}}}}'.encode()
    error(post(app, "/generate", native), 400, param=f"sampling_params.{name}")


@pytest.mark.parametrize(("name", "value",
"param"), [
    ("temperature", -0.1, None), ("temperature", 2.01, None), ("top_p", 0, None), ("top_p", 1.0001, None), ("top_p", -0.1, None),
    ("min_p", 1.1, None),
    ("min_p", -0.1, None), ("presence_penalty", 2.1, None), ("frequency_penalty", -2.1, None), ("repetition_penalty", 0, None),
    ("repetition_penalty", -1, None), ("top_k", -2, None), ("top_k", 1.5, None), ("top_k", True, None), ("top_k", "5", None), ("n", 0, None),
    ("n", -1, None), ("n", 1.5, None), ("n", 129, None), ("n", 100000, None), ("n", 2**31, None), ("n", True, None), ("best_of", 2, None),
    ("best_of", 0, None), ("max_tokens", 0, None), ("max_tokens", -1, None), ("max_tokens", 1.5, None), ("max_tokens", True, None),
    ("max_completion_tokens", "5", None), ("min_tokens", 17, None), ("min_tokens", -1, None), ("seed", 2**63, None), ("seed", -(2**63) - 1, None),
    ("seed", 1.5, None), ("seed", True, None), ("seed", "5", None), ("stop", [""], None), ("stop", "", None), ("stop", 5, None), ("stop", [5], None),
    ("stop", ["a"] * 33, None), ("stop", "a" * 4097, None), ("stop", ["é" * 2048, "b" * 2049], None),
    ("stop_token_ids", [VOCAB], "stop_token_ids[0]"), ("stop_token_ids", [2**40], "stop_token_ids[0]"),
    ("stop_token_ids", [1, -1], "stop_token_ids[1]"), ("stop_token_ids", ["a"], "stop_token_ids[0]"), ("stop_token_ids", 5, None),
    ("allowed_token_ids", [], None), ("allowed_token_ids", [VOCAB], "allowed_token_ids[0]"), ("ignore_eos", 1, None), ("ignore_eos", "true", None),
    ("skip_special_tokens", 0, None), ("logit_bias", [], None), ("logit_bias", {"99999999": 1}, None), ("logit_bias", {"-1": 1}, None),
    ("logit_bias", {"abc": 1}, None), ("logit_bias", {"1.5": 1}, None), ("logit_bias", {str(VOCAB): 1}, None), ("logit_bias", {" 1": 1}, None),
    ("logit_bias", {"٣": 1}, None), ("logit_bias", {"1": 101}, "logit_bias.1"), ("logit_bias", {"1": None}, "logit_bias.1"),
    ("logit_bias", {"1": "5"}, "logit_bias.1"), ("logit_bias", {"1": True}, "logit_bias.1"),
])  # fmt: skip
def test_rows_17_19_21_24_values_out_of_range_name_the_field(name: str, value: Any, param: str | None) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(**{name: value})
    assert caught.value.param == (param or name)
    assert name in caught.value.message


@pytest.mark.parametrize(("name", "value", "field", "expected"), [
    ("temperature", 0, "temperature", 0.0), ("temperature", 2, "temperature", 2.0), ("temperature", 5e-324, "temperature", 5e-324),
    ("top_k", -1, "top_k", 0), ("top_k", 0, "top_k", 0), ("top_k", VOCAB - 1, "top_k", VOCAB - 1),
    ("top_k", VOCAB, "top_k", 0),
    ("top_k", 12345678, "top_k", 0), ("top_k", 2**31, "top_k", 0), ("min_p", 1, "min_p", 1.0), ("top_p", 1, "top_p", 1.0), ("n", 128, "n", 128),
    ("seed", -1, "seed", None), ("seed", 2**63 - 1, "seed", 2**63 - 1), ("seed", -5, "seed", -5), ("stop", [], "stop", ()),
    ("stop", "a", "stop", ("a",)), ("stop", ["é" * 2048, "b" * 2048], "stop", ("é" * 2048, "b" * 2048)),
    ("logit_bias", {str(VOCAB - 1): -100}, "logit_bias", {VOCAB - 1: -100.0}), ("stop_token_ids", [VOCAB - 1], "stop_token_ids", (VOCAB - 1,)),
    ("no_stop_trim", True, "include_stop", True), ("include_stop_str_in_output", True, "include_stop", True), ("best_of", 1, "n", 1),
    ("min_new_tokens", 3, "min_new_tokens", 3), ("max_tokens", 7, "max_new_tokens", 7), ("allowed_token_ids", [3, 4], "allowed_token_ids", (3, 4)),
])  # fmt: skip
def test_values_at_the_edges_are_taken(name: str, value: Any, field: str, expected: Any) -> None:
    assert getattr(read(**{name: value}), field) == expected


def test_the_newer_length_name_wins_and_both_are_checked() -> None:
    assert read(max_tokens=5, max_completion_tokens=9).max_new_tokens == 9
    with pytest.raises(InvalidValue):
        read(max_tokens=0, max_completion_tokens=9)


def test_row_21_ten_thousand_biases_are_read_within_a_second() -> None:
    limits = Limits(vocab_size=20_000, max_n=1, max_logprobs=0, max_temperature=2.0, recommended={})
    start_s = time.thread_time()
    params = read_sampling(Fields({"logit_bias": {str(i): 1.5 for i in range(10_000)}}), limits, LENGTH)
    assert time.thread_time() - start_s < 1.0
    assert len(params.logit_bias) == 10_000


@pytest.mark.parametrize("name", ["structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"])
def test_constraints_are_unsupported_not_ignored(name: str) -> None:
    with pytest.raises(Unsupported):
        read(**{name: "x"})


def test_renamed_parameters_tell_their_new_name() -> None:
    with pytest.raises(InvalidValue, match=r"structured_outputs\.regex"):
        read(guided_regex="a")


@pytest.mark.parametrize(("fields", "status"), [
    ({"logprobs": True, "top_logprobs": 0}, 200), ({"logprobs": True, "top_logprobs": 20}, 200), ({"logprobs": True, "top_logprobs": 21}, 400),
    ({"logprobs": True, "top_logprobs": 5_000_000}, 400), ({"logprobs": True, "top_logprobs": -1}, 400), ({"top_logprobs": 3}, 400),
    ({"logprobs": 1}, 400), ({"logprobs": True, "top_logprobs": True}, 400), ({"logprobs": False}, 200),
])  # fmt: skip
def test_row_20_chat_logprobs_are_bounded(fields: Any, status: int) -> None:
    response = post(build_app(FakeManager(), config()), "/v1/chat/completions", {**CHAT, **fields})
    assert response.status_code == status
    if status == 200 and fields["logprobs"]:
        content = response.json()["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {fields["top_logprobs"]}


@pytest.mark.parametrize(("value", "status"), [(0, 200), (5, 200), (20, 200), (21, 400), (5_000_000, 400), (-1, 400), (True, 400), ("5", 400)])
def test_row_20_completion_and_native_logprobs_are_bounded(value: Any, status: int) -> None:
    app = build_app(FakeManager(), config())
    assert post(app, "/v1/completions", {"prompt": "x", "logprobs": value}).status_code == status
    assert post(app, "/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": value}).status_code == status


def test_the_native_dialect_allows_hotter_temperatures_and_names_its_own_fields() -> None:
    app = build_app(FakeManager(), config())
    assert post(app, "/generate", {"text": "x", "sampling_params": {"temperature": 1e6, "top_k": 1}}).status_code == 200
    error(post(app, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": -1}}), 400, param="sampling_params.max_new_tokens")
    bad = {"max_new_tokens": 2, "min_new_tokens": 3}
    error(post(app, "/generate", {"text": "x", "sampling_params": bad}), 400, param="sampling_params.min_new_tokens")
    error(post(app, "/v1/completions", {"prompt": "x", "temperature": 1e6}), 400, param="temperature")


@pytest.mark.parametrize("field", ["priority", "cache_salt", "extra_key", "deadline_s", "user", "rid", "stream", "model"])
def test_other_fields_refuse_wrong_types(field: str) -> None:
    app = build_app(FakeManager(), config())
    error(post(app, "/v1/completions", {"prompt": "x", field: [1]}), 400, param=field)


def test_other_fields_reach_the_engine_and_unknown_ones_are_ignored() -> None:
    manager = FakeManager()
    app = build_app(manager, config())
    fields = {
        "priority": -3,
        "cache_salt": "s",
        "extra_key": "e",
        "deadline_s": 2,
        "user": "u",
        "rid": "my-id",
        "store": True,
        "metadata": {"a": 1},
        "zzz": 1,
    }
    assert post(app, "/v1/completions", {"prompt": "x", **fields}).json()["id"] == "my-id"
    req = manager.requests[0]
    assert (req.priority, req.cache_salt, req.extra_key, req.deadline_s, req.user, req.rid) == (-3, "s", "e", 2.0, "u", "my-id")
    error(post(app, "/v1/completions", {"prompt": "x", "rid": "a b"}), 400, param="rid")
