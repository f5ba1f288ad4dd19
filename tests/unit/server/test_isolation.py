"""Who may share KV with whom, and whose request it is: salts and keys from the HTTP fields down to the tree, on every dialect."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from fixtures.asgi import error, events, post
from fixtures.fake_manager import FakeManager, config
from fixtures.script import Script, generate, prompt_of
from rootlet.config.load import load_config
from rootlet.config.resolve import api_keys
from rootlet.config.schema import ServerArgs
from rootlet.core.errors import BadConfig
from rootlet.engine.hash_model import EOS_ID, HashTemplate, HashTokenizer, hash_executor
from rootlet.engine.inproc import InprocRuntime
from rootlet.engine.model_side import FrontModel, LoadedExecutor
from rootlet.server.app import build_app

Post = Callable[..., Awaitable[httpx.Response]]
TEXT = "the same forty eight characters for everybody...."
DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
    ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 2}}),
]
ONE, TWO = "first-secret", "second-secret"


def over_engine(work: Callable[[Post], Awaitable[None]], **flags: Any) -> None:
    """`work` gets a POST (or GET without a body) to a whole server in this process."""
    settings = load_config({"ctx_len": 512, "max_total_tokens": 4096, "log_requests": False, "depth": "1", **flags}, {}, None)[0]
    front = FrontModel(HashTokenizer(), HashTemplate(), ("hash",))

    async def go() -> None:
        async with InprocRuntime(settings, LoadedExecutor(hash_executor(settings), (EOS_ID,)), front) as manager:
            transport = httpx.ASGITransport(app=build_app(manager, settings), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

                async def send(path: str, body: dict[str, Any] | None = None, key: str | None = None) -> httpx.Response:
                    headers = {"authorization": f"Bearer {key}"} if key else {}
                    return await client.get(path, headers=headers) if body is None else await client.post(path, json=body, headers=headers)

                await work(send)

    asyncio.run(go())


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"] if "usage" in reply else reply["meta_info"]["cached_tokens"])


async def hit(send: Post, path: str, body: dict[str, Any], *, stream: bool) -> int:
    if not stream:
        return cached((await send(path, body)).json())
    chunks = events(await send(path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    return cached(chunks[-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_row_51_two_salts_never_share(path: str, body: dict[str, Any], stream: bool) -> None:
    spaces: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"extra_key": "b"}, {"extra_key": "a", "cache_salt": "bc"},
        {"extra_key": "ab", "cache_salt": "c"}, {"cache_salt": "A"}, {"cache_salt": "a "}, {"cache_salt": "ä"}, {"cache_salt": "a\u0308"},
    ]  # fmt: skip

    async def work(send: Post) -> None:
        for space in spaces:
            assert await hit(send, path, {**body, **space}, stream=stream) == 0, space
        for space in (*spaces, {"cache_salt": None, "extra_key": ""}):
            assert await hit(send, path, {**body, **space}, stream=stream) >= 48, space

    over_engine(work)


def test_row_51_each_prompt_of_a_native_batch_has_its_own() -> None:
    async def work(send: Post) -> None:
        body = {"text": [TEXT, TEXT], "sampling_params": {"max_new_tokens": 2}, "cache_salt": ["a", "b"], "extra_key": ["x", None]}
        assert [cached(item) for item in (await send("/generate", body)).json()] == [0, 0]
        assert [cached(item) for item in (await send("/generate", {**body, "cache_salt": ["b", "a"]})).json()] == [0, 0]
        assert min(cached(item) for item in (await send("/generate", body)).json()) >= 48
        error(await send("/generate", {**body, "cache_salt": ["a"]}), 400, param="cache_salt")
        error(await send("/generate", {**body, "extra_key": [1, 2]}), 400, param="extra_key")

    over_engine(work)


@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_a_salt_holds_for_every_choice_and_for_pins(path: str, body: dict[str, Any]) -> None:
    async def work(send: Post) -> None:
        many = {**body, "sampling_params": {"max_new_tokens": 2, "n": 3}} if "sampling_params" in body else {**body, "n": 3}
        await send(path, {**many, "cache_salt": "a"})
        assert await hit(send, path, body, stream=False) == 0
        prompt = f"user {TEXT} assistant " if "messages" in body else TEXT
        pin = {"text": prompt, "add_special_tokens": "messages" not in body}
        assert (await send("/cache/pin", {**pin, "cache_salt": "a"})).status_code == 200
        error(await send("/cache/pin", {**pin, "cache_salt": "b"}), 404, code="prefix_not_cached")

    over_engine(work)


def test_adapters_have_a_root_of_their_own_and_are_refused_at_the_door() -> None:
    play = Script()
    for rid, lora in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        play.run(generate(rid, prompt_of(21), lora_id=lora))
    assert [play.replies[rid].cached_len for rid in "abcd"] == [0, 0, 0, 20]

    async def work(send: Post) -> None:
        for path, body in DIALECTS:
            for name in ("lora_path", "lora_id"):
                error(await send(path, {**body, name: "x"}), 501, code="unsupported", param="lora_path")
                error(await send(path, {**body, name: "x", "stream": True}), 501, code="unsupported")
                error(await send(path, {**body, name: 5}), 400, param=name)
                assert (await send(path, {**body, name: None})).status_code == 200

    over_engine(work)


# ---- keys ----------------------------------------------------------------------------------------------------------------------------------------


def name_of(key: str) -> str:
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


@pytest.mark.parametrize(("path", "body"), DIALECTS)
def test_with_several_keys_the_key_is_the_tenant(path: str, body: dict[str, Any]) -> None:
    manager = FakeManager()
    app = build_app(manager, config(api_key=f" {ONE}, {TWO},"))
    for key in (ONE, TWO):
        for user in ({}, {"user": "someone"}):
            assert post(app, path, {**body, **user}, headers={"x-api-key": key}).status_code == 200
            assert manager.requests[-1].user == name_of(key)
    error(post(app, path, {**body, "user": 5}, headers={"x-api-key": ONE}), 400, param="user")
    for wrong in (f"{ONE},{TWO}", f"{ONE},", "", ONE[:-1], name_of(ONE)):
        error(post(app, path, body, headers={"x-api-key": wrong}), 401, code="invalid_api_key")


@pytest.mark.parametrize("keys", [None, ONE, f"{ONE},{ONE}"])
def test_with_one_key_or_none_the_user_is_the_tenant(keys: str | None) -> None:
    manager = FakeManager()
    app = build_app(manager, config(api_key=keys))
    for path, body in DIALECTS:
        for user in (None, "someone"):
            assert post(app, path, {**body, "user": user}, headers={"x-api-key": ONE}).status_code == 200
            assert manager.requests[-1].user == user


def test_no_key_is_ever_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def work(send: Post) -> None:
        path, body = DIALECTS[1]
        assert (await send(path, {**body, "rid": "mine"}, ONE)).status_code == 200
        shown = [await send(what, None, TWO) for what in ("/debug/requests/mine", "/debug/state", "/server_info", "/metrics", "/cache/stats")]
        assert shown[0].json()["user"] == name_of(ONE)
        assert all(reply.status_code == 200 for reply in shown)
        texts = [reply.text for reply in shown] + [(await send(path, body, "wrong")).text, caplog.text]
        assert not [text for text in texts if ONE in text or TWO in text]

    with caplog.at_level(logging.DEBUG):
        over_engine(work, api_key=f"{ONE},{TWO}", schedule_policy="vtc", log_requests=True)


@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_a_knob_without_a_key_in_it_is_no_open_server(text: str) -> None:
    with pytest.raises(BadConfig, match="--api-key holds no key"):
        api_keys(ServerArgs(api_key=text))
    assert api_keys(ServerArgs()) == ()
