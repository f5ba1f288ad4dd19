"""`Engine` over HashLM: the whole runtime in one process, compared with what HashLM says without any of it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from rootlet.config.load import load_config
from rootlet.core.errors import BadConfig, ContextOverflow, InvalidValue, Unavailable
from rootlet.core.hash_lm import HashModel, reference_generate
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import FinishKind
from rootlet.engine.engine import Engine
from rootlet.engine.hash_model import EOS_ID, VOCAB_SIZE, HashTemplate, HashTokenizer, hash_executor
from rootlet.engine.model_side import FrontModel, LoadedExecutor
from rootlet.engine.results import GenerateResult

TOKENIZER = HashTokenizer()
MODEL = HashModel(vocab_size=VOCAB_SIZE, eos_id=EOS_ID)


def _engine(**flags: object) -> Engine:
    config = load_config({"ctx_len": 512, "max_total_tokens": 2048, "log_requests": False, **flags}, {}, None)[0]
    front = FrontModel(TOKENIZER, HashTemplate(), ("hash",))
    return Engine.over(config, LoadedExecutor(hash_executor(config), (EOS_ID,)), front)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with _engine() as made:
        yield made


def _expected(prompt: str, seed: int, length: int, choice: int = 0) -> tuple[int, ...]:
    ids = TOKENIZER.encode(prompt, add_special_tokens=True)
    params = SamplingParams(seed=seed, choice_index=choice)
    return tuple(reference_generate(MODEL, ids, params, max_new_tokens=length).tokens)


def _one(result: object) -> GenerateResult:
    assert isinstance(result, GenerateResult)
    return result


def test_tokens_are_what_the_model_says(engine: Engine) -> None:
    result = _one(engine.generate("hello", {"max_tokens": 20, "seed": 5}))
    assert result.token_ids == _expected("hello", 5, 20)
    assert result.text == TOKENIZER.decode(result.token_ids, skip_special_tokens=True)
    assert (result.finish_reason, result.prompt_len, result.completion_len, result.seed) == ("length", 6, 20, 5)


def test_row_07_streamed_equals_whole_for_every_choice(engine: Engine) -> None:
    sampling = {"max_tokens": 40, "seed": 1, "n": 3, "stop": ["a", "B1"]}
    whole = engine.generate("hello", sampling)
    assert isinstance(whole, list)
    chunks = list(engine.generate("hello", sampling, stream=True))
    for result in whole:
        result = _one(result)  # noqa: PLW2901
        mine = [c for c in chunks if c.index == result.index]
        assert "".join(c.text for c in mine) == result.text
        assert tuple(i for c in mine for i in c.token_ids) == result.token_ids
        assert [c.finish is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].finish is not None
        assert (str(mine[-1].finish.kind), mine[-1].completion_len) == (result.finish_reason, result.completion_len)


def test_n_choices_are_the_noise_streams_of_one_seed(engine: Engine) -> None:
    results = engine.generate("hello", {"max_tokens": 10, "seed": 3, "n": 3})
    assert isinstance(results, list)
    assert [_one(r).token_ids for r in results] == [_expected("hello", 3, 10, choice) for choice in range(3)]


def test_lists_keep_their_order_and_ids_equal_text(engine: Engine) -> None:
    prompts = ["alpha", "beta", "gamma"]
    by_text = engine.generate(prompts, {"max_tokens": 8, "seed": 2})
    by_ids = engine.generate([TOKENIZER.encode(p, add_special_tokens=True) for p in prompts], {"max_tokens": 8, "seed": 2})
    assert isinstance(by_text, list)
    assert isinstance(by_ids, list)
    assert [_one(r).token_ids for r in by_text] == [_one(r).token_ids for r in by_ids] == [_expected(p, 2, 8) for p in prompts]


def test_row_02_a_stop_string_cuts_text_tokens_and_logprobs(engine: Engine) -> None:
    whole = _one(engine.generate("hello", {"max_tokens": 50, "seed": 1}))
    stop = whole.text[20:24]
    cut = whole.text.index(stop)
    result = _one(engine.generate("hello", {"max_tokens": 50, "seed": 1, "stop": stop}, logprobs=2))
    assert (result.text, result.matched, result.completion_len) == (whole.text[:cut], stop, cut)
    assert [p.token_id for p in result.logprobs] == list(whole.token_ids[:cut])
    kept = _one(engine.generate("hello", {"max_tokens": 50, "seed": 1, "stop": stop, "include_stop": True}))
    assert kept.text == whole.text[: cut + 4]


def test_chat_renders_the_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = TOKENIZER.encode(HashTemplate().render(messages), add_special_tokens=False)
    assert _one(engine.chat(messages, {"max_tokens": 5, "seed": 1})).token_ids == _one(engine.generate(ids, {"max_tokens": 5, "seed": 1})).token_ids


def test_errors_come_as_exceptions(engine: Engine) -> None:
    with pytest.raises(InvalidValue):
        engine.generate("", add_special_tokens=False)
    with pytest.raises(ContextOverflow):
        engine.generate("x" * 600)
    with pytest.raises(InvalidValue, match="did you mean"):
        engine.generate("x", {"max_token": 1})
    with pytest.raises(ContextOverflow):
        engine.generate(["ok", "x" * 600], {"max_tokens": 400})  # one bad item ends the call, and the others with it
    with pytest.raises(BadConfig):
        Engine(no_such_flag=1)


def test_row_33_leaving_a_stream_frees_everything(engine: Engine) -> None:
    for _ in range(3):
        stream = engine.generate("hello", {"max_tokens": 400, "n": 2}, stream=True)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    _one(engine.generate("x", {"max_tokens": 1}))
    assert engine.flush_cache(60.0)  # true only when nothing runs


def test_async_calls_on_another_loop(engine: Engine) -> None:
    async def run() -> None:
        a, b = await asyncio.gather(engine.agenerate("a", {"max_tokens": 5, "seed": 1}), engine.agenerate("b", {"max_tokens": 5, "seed": 1}))
        assert (_one(a).token_ids, _one(b).token_ids) == (_expected("a", 1, 5), _expected("b", 1, 5))
        chunks = [c async for c in engine.astream("a", {"max_tokens": 5, "seed": 1})]
        assert tuple(i for c in chunks for i in c.token_ids) == _expected("a", 1, 5)
        endless = asyncio.create_task(engine.agenerate("a", {"max_tokens": 400}))
        await asyncio.sleep(0)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless

    asyncio.run(run())
    assert engine.flush_cache(60.0)


def test_state_is_answered(engine: Engine) -> None:
    assert engine.state("info")
    assert engine.detokenize(engine.tokenize("abc", add_special_tokens=False)) == "abc"


def test_close_ends_everything_and_touches_no_signal_handler() -> None:
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    threads = set(threading.enumerate())
    engine = _engine()
    stream = engine.generate("hello", {"max_tokens": 400}, stream=True)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(Unavailable):
        engine.generate("x")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert {t for t in threading.enumerate() if t.name.startswith("rootlet")} <= threads


def test_generate_continues_for_128_tokens_chat_for_what_the_context_leaves(engine: Engine) -> None:
    def length(result: object) -> int:
        return _one(result).completion_len

    free = {"ignore_eos": True}
    assert length(engine.generate("hello", free)) == 128
    assert length(engine.generate("hello", {**free, "max_tokens": None})) == 512 - 6
    assert length(engine.generate("hello", SamplingParams(ignore_eos=True))) == 512 - 6
    chat = _one(engine.chat([{"role": "user", "content": "hi"}], free))
    assert chat.completion_len == 512 - chat.prompt_len


def test_max_tokens_zero_is_prefill_only(engine: Engine) -> None:
    result = _one(engine.generate("hello", {"max_tokens": 0}))
    assert (result.text, result.completion_len, result.finish_reason) == ("", 0, str(FinishKind.LENGTH))
