"""The routes over the whole runtime in one process (HashLM): the fake manager's promises are the real one's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from fixtures.asgi import Wire, error, events
from rootlet.config.load import load_config
from rootlet.engine.hash_model import EOS_ID, HashTemplate, HashTokenizer, hash_executor
from rootlet.engine.inproc import InprocRuntime
from rootlet.engine.model_side import FrontModel, LoadedExecutor
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.server.app import build_app

Post = Callable[[str, dict[str, Any]], Awaitable[httpx.Response]]


def over_engine(work: Callable[[Post, TokenizerManager, Any], Awaitable[None]], executor: str = "hash_lm") -> None:
    config = load_config({"ctx_len": 512, "max_total_tokens": 2048, "log_requests": False, "depth": "1"}, {}, None)[0]
    front = FrontModel(HashTokenizer(), HashTemplate(), ("hash",))

    async def go() -> None:
        async with InprocRuntime(config, LoadedExecutor(hash_executor(config, executor), (EOS_ID,)), front) as manager:
            app = build_app(manager, config)
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

                async def send(path: str, body: dict[str, Any]) -> httpx.Response:
                    return await client.post(path, json=body)

                await work(send, manager, app)

    asyncio.run(go())


def test_row_07_streams_equal_replies_on_both_routes() -> None:
    async def work(send: Post, _manager: TokenizerManager, _app: Any) -> None:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": ["hello", "bye"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ]
        for path, prompt in bodies:
            body = {**prompt, "n": 3, "seed": 1, "max_tokens": 30, "stop": ["a", "B1"]}
            whole = (await send(path, body)).json()
            chunks = events(await send(path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
            for choice in whole["choices"]:
                mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
                text = "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in mine)
                assert text == choice.get("text", choice.get("message", {}).get("content"))
                assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
                assert mine[-1]["stop_reason"] == choice["stop_reason"]
            for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert chunks[-1]["usage"][key] == whole["usage"][key]

    over_engine(work)


def test_row_29_echo_logprobs_are_the_same_cold_warm_and_streamed() -> None:
    async def work(send: Post, _manager: TokenizerManager, _app: Any) -> None:
        body = {"prompt": "the quick brown fox " * 6, "echo": True, "logprobs": 3, "max_tokens": 5, "seed": 2}
        cold, warm = (await send("/v1/completions", body)).json(), (await send("/v1/completions", body)).json()
        assert cold["choices"] == warm["choices"]
        logprobs = cold["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == cold["choices"][0]["text"]
        assert len(logprobs["token_logprobs"]) == cold["usage"]["total_tokens"]
        streamed = [c["choices"][0] for c in events(await send("/v1/completions", {**body, "stream": True}))]
        for key in logprobs:
            assert [v for c in streamed if c["logprobs"] for v in c["logprobs"][key]] == logprobs[key]

    over_engine(work)


def test_row_32_the_length_rule_is_one_everywhere() -> None:
    async def work(send: Post, _manager: TokenizerManager, _app: Any) -> None:
        for stream in (False, True):
            for body in ({"prompt": [5] * 512}, {"prompt": [[5], [6], [5] * 600]}, {"prompt": "x" * 600}):
                refused = error(await send("/v1/completions", {**body, "stream": stream}), 400, code="context_length_exceeded")
                assert refused["n_ctx"] == 512
        close = {"prompt": [5] * 507, "ignore_eos": True}
        for length in ({"max_tokens": 100}, {"max_completion_tokens": 100}, {"max_tokens": 100, "max_completion_tokens": 50}):
            reply = (await send("/v1/completions", {**close, **length})).json()
            assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 5)

    over_engine(work)


def test_the_id_of_a_reply_aborts_a_whole_batch_on_both_routes_twice() -> None:
    """It was a no-op: the prompts of a batch run under ids of their own."""

    async def work(send: Post, manager: TokenizerManager, _app: Any) -> None:
        endless = {"max_tokens": 400, "ignore_eos": True, "n": 2}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": ["a", "b", "c"], **endless}),
            ("/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True, "n": 2}}),
            ("/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}),
            ("/v1/completions", {"prompt": "a", **endless}),
        ]
        for path, body in bodies * 2:
            num = len(body.get("prompt", body.get("text"))) if isinstance(body.get("prompt", body.get("text")), list) else 1
            assert (await send("/pause_generation", {"mode": "in_place"})).status_code == 200  # nothing of it can end by itself meanwhile
            task = asyncio.create_task(send(path, {**body, "rid": "mine"}))
            async with asyncio.timeout(60):
                while manager.num_open < num:
                    await asyncio.sleep(0)
            for other in ("min", "mine-", "mine-9"):
                await send("/abort_request", {"rid": other})
            assert manager.num_open == num
            assert (await send("/abort_request", {"rid": "mine"})).status_code == 200
            error(await task, 499, code="aborted")
            async with asyncio.timeout(60):
                while manager.num_open:
                    await asyncio.sleep(0)
            await send("/continue_generation", {})

    over_engine(work)


def test_row_33_a_reader_that_leaves_gives_its_place_back() -> None:
    """20 ms a step: 400 tokens are not over before we look."""

    async def work(send: Post, manager: TokenizerManager, app: Any) -> None:
        for stream in (True, False):
            body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "n": 4, "stream": stream}
            wire = Wire("/v1/completions", body)
            task = asyncio.create_task(app(wire.scope, wire.receive, wire.send))
            while not manager.num_open or (stream and not wire.sent):
                await asyncio.sleep(0)
            wire.leave()
            await task
            reply = await send("/v1/completions", {"prompt": "next", "max_tokens": 2})
            assert reply.status_code == 200
            async with asyncio.timeout(60):
                while manager.num_open:
                    await asyncio.sleep(0)
        ledger = (await manager.get_state("metrics"))["gauges"]
        assert (ledger["running"], ledger["kv_private_pages"]) == (0, 0)

    over_engine(work, "hash_lm:20")
