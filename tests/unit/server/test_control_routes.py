"""Pause, pins and the cache's views: the routes on a fake engine, then over the whole runtime on the hash LM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fixtures.asgi import call, error, post
from fixtures.fake_manager import FakeManager, config
from rootlet.cli.remote import explain
from rootlet.config.load import load_config
from rootlet.engine.hash_model import EOS_ID, HashTemplate, HashTokenizer, hash_executor
from rootlet.engine.inproc import InprocRuntime
from rootlet.engine.model_side import FrontModel, LoadedExecutor
from rootlet.server.app import build_app


def test_pause_takes_a_mode_and_an_empty_body_means_abort() -> None:
    manager = FakeManager()
    app = build_app(manager, config())
    error(call(app, "POST", "/pause_generation"), 400)
    assert post(app, "/pause_generation", {}).json() == {"status": "ok", "mode": "abort", "paused": True}
    for mode in ("retract", "in_place"):
        assert post(app, "/pause_generation", {"mode": mode}).json()["mode"] == mode
    assert post(app, "/continue_generation", {}).json() == {"status": "ok", "paused": False}
    for bad in ("now", 5, ["abort"]):
        error(post(app, "/pause_generation", {"mode": bad}), 400, param="mode")
    assert manager.control.asked == [("pause", "abort"), ("pause", "retract"), ("pause", "in_place"), ("resume",)]


def test_pins_by_text_or_ids_with_a_time_limit() -> None:
    manager = FakeManager()
    app = build_app(manager, config())
    assert post(app, "/cache/pin", {"text": "ab", "ttl_s": 5}).json() == manager.control.pinned
    post(app, "/cache/pin", {"input_ids": [1, 2], "extra_key": "x"})
    assert manager.control.asked[0] == ("pin", (97, 98), {"ttl_s": 5.0, "extra_key": None, "cache_salt": None})
    assert manager.control.asked[1][1:] == ((1, 2), {"ttl_s": 300.0, "extra_key": "x", "cache_salt": None})
    for body, param in (({}, "text"), ({"text": ""}, "text"), ({"input_ids": ["a"]}, "input_ids[0]"), ({"text": "a", "ttl_s": 0}, "ttl_s")):
        error(post(app, "/cache/pin", body), 400, param=param)
    manager.control.pinned = {"pin_id": None, "tokens": 0, "of": 2}
    error(post(app, "/cache/pin", {"text": "ab"}), 404, code="prefix_not_cached", param="text")
    error(post(app, "/cache/pin", {"input_ids": [1]}), 404, code="prefix_not_cached", param="input_ids")
    manager.control.pinned = {"error": "too many"}
    error(post(app, "/cache/pin", {"text": "ab"}), 409, code="too_many_pins")
    assert post(app, "/cache/unpin", {"all": True}).json() == {"unpinned": ["pin-1"]}
    error(post(app, "/cache/unpin", {"pin_id": "gone"}), 404, code="pin_not_found")
    error(post(app, "/cache/unpin", {}), 400, param="pin_id")
    assert call(app, "GET", "/cache/tree").text == ".\n"
    assert call(app, "GET", "/cache/stats").json() == {"cache": {}, "pins": []}


@pytest.mark.parametrize("depth", ["1", "2"])
def test_over_the_runtime_a_request_is_paused_resumed_traced_and_its_prefix_pinned(depth: str) -> None:
    options = {"ctx_len": 512, "max_total_tokens": 2048, "log_requests": False, "depth": depth, "chunked_prefill": 32}
    settings = load_config(options, {}, None)[0]
    front = FrontModel(HashTokenizer(), HashTemplate(), ("hash",))
    text = "the same beginning for everybody " * 4

    async def go() -> None:
        async with InprocRuntime(settings, LoadedExecutor(hash_executor(settings), (EOS_ID,)), front) as manager:
            transport = httpx.ASGITransport(app=build_app(manager, settings), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                await session(client)

    async def session(client: httpx.AsyncClient) -> None:
        async def send(path: str, **body: Any) -> Any:
            return (await client.post(path, json=body)).json()

        body = {"prompt": text, "max_tokens": 200, "seed": 3, "ignore_eos": True}
        alone = await send("/v1/completions", **body)
        assert (await send("/pause_generation", mode="retract"))["paused"] is True
        task = asyncio.create_task(send("/v1/completions", rid="traced", user="someone", **body))
        found: dict[str, Any] = {}
        while found.get("phase") != "waiting":
            found = (await client.get("/debug/requests/traced")).json()
        assert not task.done()
        await send("/continue_generation")
        again = await task
        assert again["choices"][0]["text"] == alone["choices"][0]["text"]
        found = (await client.get("/debug/requests/traced")).json()
        lines = list(explain(found))
        assert lines[0].startswith("traced: done; prompt")
        assert any("queued" in line for line in lines)
        assert any("paused: nothing is launched" in line for line in lines)
        assert "finished: length after 200 tokens" in lines[-1]
        pinned = await send("/cache/pin", text=text)
        assert pinned["tokens"] == pinned["of"] // 16 * 16
        stats = (await client.get("/cache/stats")).json()
        assert stats["pins"][0]["pin_id"] == pinned["pin_id"]
        assert stats["cache"]["locks"] == 1
        assert "locks 1" in (await client.get("/cache/tree")).text
        assert (await send("/cache/unpin", pin_id=pinned["pin_id"])) == {"unpinned": [pinned["pin_id"]]}
        assert json.loads((await client.get("/debug/requests/nobody")).text)["error"]["code"] == "request_not_found"

    asyncio.run(go())
