"""The Python API's arguments: every shape that is taken; for everything else an `InvalidValue` that names argument, value and what is possible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rootlet
from rootlet.config.load import load_config
from rootlet.core.errors import InvalidValue
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import LogprobSpec
from rootlet.engine.arguments import prompts_of, requests_of, sampling_of
from rootlet.engine.engine import Engine
from rootlet.engine.hash_model import EOS_ID, VOCAB_SIZE, HashTemplate, HashTokenizer, hash_executor
from rootlet.engine.model_side import FrontModel, LoadedExecutor

SHORT = {"max_tokens": 2}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = load_config({"ctx_len": 512, "max_total_tokens": 2048, "log_requests": False}, {}, None)[0]
    front = FrontModel(HashTokenizer(), HashTemplate(), ("hash",))
    with Engine.over(config, LoadedExecutor(hash_executor(config), (EOS_ID,)), front) as made:
        yield made


def test_sampling_from_a_dict_with_aliases_and_defaults() -> None:
    got = sampling_of({"max_tokens": 4, "stop": "x", "temperature": None}, {"temperature": 0.5, "top_p": 0.9})
    assert got == SamplingParams(max_new_tokens=4, stop=("x",), temperature=0.5, top_p=0.9)
    assert sampling_of(SamplingParams(n=2), {"temperature": 0.1}) == SamplingParams(n=2)
    assert sampling_of(None, {}) == SamplingParams()
    assert sampling_of({"stop_token_ids": 3, "logit_bias": {3: 1}}, {}) == SamplingParams(stop_token_ids=(3,), logit_bias={3: 1.0})


BAD_SAMPLING: list[tuple[Any, str, str]] = [
    (5, "sampling", "a dict, SamplingParams or None, got 5"), (0, "sampling", "got 0"), ("x", "sampling", "got 'x'"),
    ([("n", 1)], "sampling", "dict"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"), ({"max_token": 1}, "max_token", "did you mean 'max_tokens'"),
     ({5: 1}, "5", "known: "), ({None: 1}, "None", "known: "),
    ({"temperature": "hot"}, "temperature", "must be a number, got 'hot'"), ({"temperature": True}, "temperature", "a number, got True"),
    ({"max_tokens": 1.5}, "max_tokens", "an integer or None, got 1.5"), ({"max_tokens": "3"}, "max_tokens", "an integer"),
    ({"max_tokens": 1, "max_new_tokens": 2}, "max_new_tokens", "twice"), ({"n": True}, "n", "an integer, got True"),
    ({"stop": 3}, "stop", "a string or a list of strings"), ({"stop": ["a", None]}, "stop", "got ['a', None]"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids", "a list of token ids"), ({"logit_bias": {"5": 1}}, "logit_bias", "a mapping from token ids"),
    ({"ignore_eos": 1}, "ignore_eos", "True or False, got 1"), ({"seed": 1.5}, "seed", "an integer or None"),
    ({"stop": ["x" * 9999, 5]}, "stop", "..."),
    (SamplingParams(temperature="hot"), "temperature", "a number"), (SamplingParams(n=1.5), "n", "an integer"),  # type: ignore[arg-type]
    (SamplingParams(stop=None), "stop", "got None"), (SamplingParams(choice_index="a"), "choice_index", "an integer"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("given", "param", "words"), BAD_SAMPLING)
def test_bad_sampling_is_named(given: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        sampling_of(given, {})
    assert caught.value.param == param
    assert words in caught.value.message
    assert len(caught.value.message) < 700


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("a", (["a"], False)),
        ([1, 2], ([(1, 2)], False)),
        ((1, 2), ([(1, 2)], False)),
        (range(3), ([(0, 1, 2)], False)),
        (np.array([1, 2]), ([(1, 2)], False)),
        ([np.int32(7), 8], ([(7, 8)], False)),
        (["a", "b"], (["a", "b"], True)),
        ([[1], [2, 3]], ([(1,), (2, 3)], True)),
        (np.array([[1], [2]]), ([(1,), (2,)], True)),
        (["a", [1]], (["a", (1,)], True)),
        (["a"], (["a"], True)),
    ],
)
def test_prompt_shapes(prompt: Any, want: Any) -> None:
    assert prompts_of(prompt) == want
    assert all(type(i) is int for item in prompts_of(prompt)[0] if isinstance(item, tuple) for i in item)


@pytest.mark.parametrize(("prompt", "param"), [
    (5, "prompt"), (None, "prompt"), (True, "prompt"), (1.5, "prompt"), (b"ab", "prompt"), (bytearray(b"a"), "prompt"), ({"a": 1}, "prompt"),
    ({1, 2}, "prompt"), (np.array(5), "prompt"), (object(), "prompt"), ([], "prompt"), ([[]], "prompt[0]"), ([[1], []], "prompt[1]"),
    ([1, "a"], "prompt[1]"), (["a", 1], "prompt[1]"), ([[1], [True]], "prompt[1][0]"), ([[1, 2, "a"]], "prompt[0][2]"), ([1, True], "prompt[1]"),
    ([1.5], "prompt[0]"), ([None], "prompt[0]"), ([b"a"], "prompt[0]"), ([[[1]]], "prompt[0][0]"),
    (["a", None], "prompt[1]"), ([1, 2.0], "prompt[1]"),
])  # fmt: skip
def test_bad_prompts_are_refused_and_name_the_item(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidValue, match=r"must be|is empty") as caught:
        prompts_of(prompt)
    assert caught.value.param == param


def test_a_rid_names_every_prompt_of_a_list_and_errors_name_theirs() -> None:
    reqs, many = requests_of(["a", [1]], SamplingParams(), None, stream=False, request={"rid": "r", "priority": 3})
    assert [(req.rid, req.batch_rid, req.param, req.priority, req.prompt, req.input_ids) for req in reqs] == [
        ("r-0", "r", "prompt[0]", 3, "a", None),
        ("r-1", "r", "prompt[1]", 3, None, (1,)),
    ]
    assert many
    assert requests_of("a", SamplingParams(), None, stream=False, request={"rid": "r"})[0][0].rid == "r"


CALLS: list[tuple[Callable[[Engine], Any], str]] = [
    (lambda e: e.generate(5), "prompt"),
    (lambda e: e.generate(5, stream=True), "prompt"),
    (lambda e: e.generate(["a", "b"], SHORT, stream=True), "prompt"),
    (lambda e: e.generate("a", SHORT, stream=1), "stream"),
    (lambda e: e.generate("a", "x"), "sampling"),
    (lambda e: e.generate("a", {"allowed_token_ids": []}), "allowed_token_ids"),
    (lambda e: e.generate("a", {"choice_index": 2**70}), "choice_index"),
    (lambda e: e.generate("a", SHORT, logprobs="x"), "logprobs"),
    (lambda e: e.generate("a", SHORT, logprobs=True), "logprobs"),
    (lambda e: e.generate("a", SHORT, logprobs=LogprobSpec(top_n="x")), "logprobs.top_n"),  # type: ignore[arg-type]
    (lambda e: e.generate("a", SHORT, rid=5), "rid"),
    (lambda e: e.generate("a", SHORT, cache_salt=b"a"), "cache_salt"),
    (lambda e: e.generate("a", SHORT, priority=1.5), "priority"),
    (lambda e: e.generate("a", SHORT, deadline_s="x"), "deadline_s"),
    (lambda e: e.generate("a", SHORT, deadline_s=0), "deadline_s"),
    (lambda e: e.generate("a", SHORT, cach_salt="x"), "cach_salt"),
    (lambda e: e.generate("a", SHORT, input_ids=[1]), "input_ids"),
    (lambda e: e.generate(["a", [VOCAB_SIZE]], SHORT), "prompt[1]"),
    (lambda e: e.chat(5), "messages"),
    (lambda e: e.chat([]), "messages"),
    (lambda e: e.chat(MESSAGES[0]), "messages"),
    (lambda e: e.chat("hi"), "messages"),
    (lambda e: e.chat(["hi"]), "messages[0]"),
    (lambda e: e.chat([{"content": "hi"}]), "messages[0].role"),
    (lambda e: e.chat(MESSAGES, tools=5), "tools"),
    (lambda e: e.chat(MESSAGES, tools=[5]), "tools[0]"),
    (lambda e: e.chat(MESSAGES, continue_final_message=5), "continue_final_message"),
    (lambda e: e.chat(MESSAGES, logprobs=2), "logprobs"),
    (lambda e: e.chat(MESSAGES, 5), "sampling"),
    (lambda e: e.tokenize(5), "text"),  # type: ignore[arg-type]
    (lambda e: e.detokenize("abc"), "token_ids"),  # type: ignore[arg-type]
    (lambda e: e.detokenize([0, VOCAB_SIZE]), "token_ids[1]"),
    (lambda e: e.flush_cache("x"), "timeout_s"),  # type: ignore[arg-type]
    (lambda e: e.flush_cache(-1), "timeout_s"),
    (lambda e: e.flush_cache(float("nan")), "timeout_s"),
    (lambda e: e.state("nosuch"), "what"),
    (lambda e: e.state(5), "what"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("call", "param"), CALLS)
def test_a_bad_argument_is_named_and_the_engine_goes_on(engine: Engine, call: Callable[[Engine], Any], param: str, times: int) -> None:
    for _ in range(times):
        with pytest.raises(rootlet.InvalidValue) as caught:
            call(engine)
        assert caught.value.param == param
        assert isinstance(caught.value, rootlet.RootletError)
    assert engine.flush_cache(5.0)  # nothing was left behind


@pytest.mark.parametrize("prompt", [5, None, [1, "a"], []])
def test_the_awaitable_ones_refuse_alike(engine: Engine, prompt: Any) -> None:
    async def run() -> None:
        with pytest.raises(InvalidValue, match="prompt"):
            await engine.agenerate(prompt)
        with pytest.raises(InvalidValue, match="prompt"):
            await anext(engine.astream(prompt))
        with pytest.raises(InvalidValue, match="a stream is of one prompt"):
            await anext(engine.astream(["a", "b"]))

    asyncio.run(run())
