"""Server-sent events on the wire: framing, headers, keep-alive, clients that leave or stall. Raw ASGI, no sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from fixtures.asgi import Wire, error, events, post
from fixtures.fake_manager import FakeManager, Script, config
from rootlet.core.clock import SystemClock, VirtualClock
from rootlet.core.errors import RequestFailed
from rootlet.core.types import Finish, FinishKind
from rootlet.server import sse
from rootlet.server.app import build_app
from rootlet.server.sse import EventStream

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"}), ("/v1/completions", {"prompt": ["x", "y", "z"]}),
    ("/generate", {"text": "x"}),
    ("/generate", {"text": ["x", "y"]}), ("/v1/chat/completions", {**CHAT, "n": 4}),
]  # fmt: skip


async def settle(condition: Any) -> None:
    """Lets the loop run until `condition()` holds; bounded by turns, not by time."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_row_06_frames_are_one_data_line_each_and_headers_keep_proxies_from_buffering(path: str, body: dict[str, Any]) -> None:
    response = post(build_app(FakeManager([Script(("line\nbreak", "\r\n", "é"))]), config()), path, {**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    assert "\r" not in response.text
    assert events(response)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_row_33_a_client_that_leaves_ends_its_requests_at_once(path: str, body: dict[str, Any], stream: bool) -> None:
    async def go() -> None:
        manager = FakeManager([Script(("a", "b"), hold={1: asyncio.Event()})])
        wire = Wire(path, {**body, "stream": stream})
        task = asyncio.create_task(build_app(manager, config())(wire.scope, wire.receive, wire.send))
        await settle(lambda: manager.running and (wire.sent or not stream))
        wire.leave()
        await settle(task.done)
        await task
        assert manager.running == 0
        assert len(manager.closed) == len(manager.requests) > 0
        assert "[DONE]" not in wire.text

    asyncio.run(go())


def test_row_33_a_client_that_leaves_before_the_first_token_frees_the_request_too() -> None:
    async def go() -> None:
        manager = FakeManager([Script(("a",), hold={0: asyncio.Event()})])
        wire = Wire("/v1/chat/completions", {**CHAT, "stream": True})
        task = asyncio.create_task(build_app(manager, config())(wire.scope, wire.receive, wire.send))
        await settle(lambda: manager.running)
        assert wire.sent == []
        wire.leave()
        await settle(task.done)
        assert manager.running == 0
        assert wire.sent[0]["status"] == 499

    asyncio.run(go())


def test_the_client_sees_each_event_before_the_next_one_exists() -> None:
    async def go() -> None:
        gate = asyncio.Event()
        wire = Wire("/v1/completions", {"prompt": "x", "stream": True})
        manager = FakeManager([Script(("first", "second"), hold={1: gate})])
        task = asyncio.create_task(build_app(manager, config())(wire.scope, wire.receive, wire.send))
        await settle(lambda: "first" in wire.text)
        assert "second" not in wire.text
        gate.set()
        await task
        assert wire.text.endswith("data: [DONE]\n\n")

    asyncio.run(go())


def ready(item: bytes) -> asyncio.Future[bytes]:
    """A first frame that is already there."""
    future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    future.set_result(item)
    return future


async def _frames(gate: asyncio.Event, *items: bytes, fail: bool = False) -> AsyncGenerator[bytes, None]:
    for item in items:
        yield item
    await gate.wait()
    if fail:
        raise RequestFailed("broken inside")


def test_silence_is_broken_by_a_comment_only_after_the_keepalive_time() -> None:
    async def go() -> None:
        gate = asyncio.Event()
        wire = Wire("/", {})
        await wire.receive()
        stream = EventStream(ready(b"data: 1\n\n"), _frames(gate, b"data: 2\n\n"), keepalive_s=0.01, stall_s=0.0, clock=SystemClock())
        task = asyncio.create_task(stream({}, wire.receive, wire.send))
        while ": keep-alive" not in wire.text:
            wire.arrived.clear()
            await wire.arrived.wait()
        gate.set()
        await task
        assert wire.text.startswith("data: 1\n\ndata: 2\n\n: keep-alive\n\n")
        assert wire.text.endswith("data: [DONE]\n\n")
        assert wire.sent[-1]["more_body"] is False

    asyncio.run(go())


def test_zero_keepalive_never_sends_a_comment_and_errors_come_before_done() -> None:
    async def go() -> None:
        gate = asyncio.Event()
        gate.set()
        wire = Wire("/", {})
        await wire.receive()
        await EventStream(ready(b"data: 1\n\n"), _frames(gate, fail=True), keepalive_s=0.0, stall_s=0.0, clock=VirtualClock())(
            {}, wire.receive, wire.send
        )
        first, second, done, end = wire.text.split("\n\n")
        assert (first, done, end) == ("data: 1", "data: [DONE]", "")
        assert orjson.loads(second[6:])["error"]["message"] == "broken inside"

    asyncio.run(go())


def test_row_36_a_reader_that_takes_nothing_is_dropped_and_its_generator_closed() -> None:
    async def go() -> None:
        closed = asyncio.Event()
        cut: list[bool] = []

        async def frames() -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: 1\n\n"
                yield b"data: 2\n\n"
            finally:
                closed.set()

        async def never(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        source = frames()
        first = await anext(source)
        wire = Wire("/", {})
        await wire.receive()
        scope = {"extensions": {sse.ABORT: lambda: cut.append(True)}}
        await EventStream(ready(first), source, keepalive_s=0.0, stall_s=0.02, clock=SystemClock())(scope, wire.receive, never)
        assert closed.is_set()
        assert cut == [True]

    asyncio.run(go())


def test_a_connection_that_breaks_under_a_write_is_a_client_that_left() -> None:
    async def go() -> None:
        manager = FakeManager([Script(("a", "b", "c"))])
        wire = Wire("/v1/completions", {"prompt": "x", "stream": True})

        async def broken(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise ConnectionResetError

        await build_app(manager, config())(wire.scope, wire.receive, broken)
        assert manager.running == 0
        assert manager.closed == [manager.requests[0].rid]

    asyncio.run(go())


def test_early_refusals_of_a_stream_are_plain_json() -> None:
    app = build_app(FakeManager(), config())
    response = post(app, "/v1/completions", {"prompt": [1] * 300, "stream": True})
    error(response, 400, code="context_length_exceeded")
    assert "text/event-stream" not in response.headers["content-type"]


def test_the_batch_merger_passes_every_event_of_a_long_batch() -> None:
    app = build_app(FakeManager([Script(tuple("abcdefghij"))]), config())
    chunks = events(post(app, "/v1/completions", {"prompt": ["p"] * 100, "stream": True, "stream_options": {"include_usage": True}}))
    texts = [""] * 100
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["abcdefghij"] * 100
    assert chunks[-1]["usage"]["completion_tokens"] == 1100


def test_a_prefill_longer_than_the_keepalive_opens_the_stream_and_may_still_end_in_an_error() -> None:
    async def go() -> None:
        gate = asyncio.Event()
        manager = FakeManager([Script((), finish=Finish(FinishKind.ERROR, status=500, message="nan"), hold={0: gate})])
        wire = Wire("/v1/chat/completions", {**CHAT, "stream": True})
        task = asyncio.create_task(build_app(manager, config(sse_keepalive=0.01))(wire.scope, wire.receive, wire.send))
        while ": keep-alive" not in wire.text:
            wire.arrived.clear()
            await wire.arrived.wait()
        assert wire.sent[0]["status"] == 200
        gate.set()
        await task
        comment, *_, failure, done, end = wire.text.split("\n\n")
        assert (comment, done, end) == (": keep-alive", "data: [DONE]", "")
        assert orjson.loads(failure[6:])["error"]["message"] == "nan"

    asyncio.run(go())


@pytest.mark.parametrize(("value", "status"), [(0, 200), (1, 200), (3600, 200), (0.5, 400), (1e-9, 400), (-1, 400), (3601, 400), ("1", 400)])
def test_pings_cannot_be_asked_for_more_often_than_once_a_second(value: Any, status: int) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT), ("/generate", {"text": "x"})):
        response = post(build_app(FakeManager(), config()), path, {**body, "stream": True, "sse_ping_interval": value})
        assert response.status_code == status
        if status == 400:
            error(response, 400, param="sse_ping_interval")


def test_a_client_that_leaves_an_opened_but_silent_stream_frees_the_request() -> None:
    async def go() -> None:
        manager = FakeManager([Script(("a",), hold={0: asyncio.Event()})])
        wire = Wire("/v1/completions", {"prompt": "x", "stream": True})
        task = asyncio.create_task(build_app(manager, config(sse_keepalive=0.01))(wire.scope, wire.receive, wire.send))
        await wire.arrived.wait()
        wire.leave()
        await task
        assert manager.running == 0
        assert "[DONE]" not in wire.text

    asyncio.run(go())
