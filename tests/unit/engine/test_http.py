"""The HTTP protocol under peers that are slow, endless, gone, or ahead of themselves: over a real socket, with an application of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rootlet.config.schema import ServerArgs
from rootlet.engine import http
from rootlet.engine.http import MAX_HEAD_BYTES, HttpServer
from rootlet.engine.listen import listen

DEADLINE_S = 120.0  # so that nothing hangs


class App:
    """`/wait` answers when its client leaves, anything else at once with the length of the body. `left` = paths whose client was seen to leave."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.left: list[str] = []
        self.changed = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope["path"])
        self.changed.set()
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._leaves(scope)
                return
            size, more = size + len(message["body"]), message["more_body"]
        if scope["path"].startswith("/wait"):
            while (await receive())["type"] != "http.disconnect":
                await asyncio.sleep(0)
            self._leaves(scope)
            return
        body = str(size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    def _leaves(self, scope: Any) -> None:
        self.left.append(scope["path"])
        self.changed.set()


class Peer:
    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Peer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def flood(self, begun: bytes, piece: bytes) -> None:
        """`piece` again and again, until the server has had enough; it says why, unless the reset of what it did not read overtakes that."""
        with contextlib.suppress(ConnectionError):
            await self.say(begun)
            for _ in range(100 * MAX_HEAD_BYTES // len(piece)):
                await self.say(piece)
            raise AssertionError("the server takes anything")
        with contextlib.suppress(ConnectionError):
            refused(await self.all(), 431, "headers_too_large")

    async def all(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), DEADLINE_S)


class HeldClock(asyncio.SelectorEventLoop):
    """Real sockets, but time goes on only when the test says so: no stall of the machine is taken for silence of a peer."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    @classmethod
    def advance(cls, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, cls)
        loop.now_s += seconds


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Awaitable[None]]:
    """Waits until the server has read so many bytes, of all peers together."""
    num_bytes, real = 0, http._Protocol.data_received

    def counted(protocol: http._Protocol, data: bytes) -> None:
        nonlocal num_bytes
        real(protocol, data)
        num_bytes += len(data)

    async def until_read(count: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while num_bytes < count:
            assert time.monotonic() < deadline_s, f"{num_bytes} of {count} bytes were read"
            await asyncio.sleep(0)

    monkeypatch.setattr(http._Protocol, "data_received", counted)
    return until_read


def serve_on_held_clock(work: Callable[[App, int, HttpServer], Awaitable[None]], *, keep_alive: int) -> None:
    async def go() -> None:
        app, sock = App(), listen("127.0.0.1", 0)
        server = HttpServer(app, ServerArgs(keep_alive=keep_alive))
        running = asyncio.create_task(server.run_on(sock))
        try:
            await work(app, sock.getsockname()[1], server)
        finally:
            server.stop(0.0)
            while not running.done():
                HeldClock.advance(0.1)
                await asyncio.sleep(0)
            sock.close()

    with asyncio.Runner(loop_factory=HeldClock) as runner:
        runner.run(go())


def serve(work: Callable[[App, int], Awaitable[None]], *, keep_alive: int = 75) -> None:
    async def go() -> None:
        app = App()
        sock = listen("127.0.0.1", 0)
        server = HttpServer(app, ServerArgs(keep_alive=keep_alive))
        running = asyncio.create_task(server.run_on(sock))
        try:
            await work(app, sock.getsockname()[1])
        finally:
            server.stop(0.0)
            await running
            sock.close()

    asyncio.run(go())


def head(path: str, *more: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *more, "", ""]).encode()


def refused(answer: bytes, status: int, code: str) -> None:
    start, _, body = answer.partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    error = json.loads(body)["error"]
    assert (error["status"], error["code"]) == (status, code)
    assert error["message"]


@pytest.mark.parametrize("begun", [
    b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nx", head("/x", "transfer-encoding: chunked") + b"2\r\nab\r\n0\r\nt: ",
    head("/x", "transfer-encoding: chunked") + b"2;ext=",
])  # fmt: skip
def test_a_head_or_a_trailer_without_end_is_refused_long_before_it_fills_the_memory(begun: bytes) -> None:
    async def work(app: App, port: int) -> None:
        async with Peer(port) as peer:
            await peer.flood(begun, b"a" * 1000)
        assert app.left == app.begun

    serve(work)


def test_many_trailers_are_refused_and_a_few_are_left_out() -> None:
    async def work(app: App, port: int) -> None:
        begun = head("/x", "transfer-encoding: chunked", "connection: close") + b"2\r\nab\r\n0\r\n"
        async with Peer(port) as peer:
            await peer.flood(begun, b"t: x\r\n" * 150)
        async with Peer(port) as peer:
            await peer.say(begun + b"t: x\r\n\r\n")
            assert (await peer.all()).endswith(b"\r\n\r\n2")

    serve(work)


def test_a_long_body_in_small_chunks_is_no_long_head() -> None:
    async def work(app: App, port: int) -> None:
        async with Peer(port) as peer:
            await peer.say(head("/x", "transfer-encoding: chunked", "connection: close") + b"1;e=f\r\na\r\n" * 50_000 + b"0\r\n\r\n")
            assert (await peer.all()).endswith(b"\r\n\r\n50000")

    serve(work)


def test_who_begins_and_says_no_more_is_told_and_cut(heard: Callable[[int], Awaitable[None]]) -> None:
    async def work(app: App, port: int, server: HttpServer) -> None:
        beginnings = [
            b"",
            b"GET",
            head("/x", "content-length: 5"),
            head("/x", "content-length: 5") + b"ab",
            head("/x", "transfer-encoding: chunked") + b"5\r\na",
        ]
        peers = [Peer(port) for _ in beginnings]
        for peer, begun in zip(peers, beginnings, strict=True):
            await peer.__aenter__()
            await peer.say(begun)
        await heard(len(b"".join(beginnings)))
        HeldClock.advance(0.9)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (len(server.server_state.connections), app.left) == (len(peers), [])
        HeldClock.advance(0.1)
        for peer in peers:
            refused(await peer.all(), 408, "request_timeout")
            await peer.__aexit__()
        assert app.left == ["/x"] * 3

    serve_on_held_clock(work, keep_alive=1)


def test_who_speaks_slowly_or_waits_for_an_answer_is_not_cut(heard: Callable[[int], Awaitable[None]]) -> None:
    async def work(app: App, port: int, server: HttpServer) -> None:
        async with Peer(port) as slow, Peer(port) as patient:
            await patient.say(head("/wait"))
            message = head("/x", "content-length: 12", "connection: close") + b"a" * 12
            for at in range(0, len(message), 12):  # one piece in 0.9 s: longer than the limit in all
                await slow.say(message[at : at + 12])
                await heard(len(head("/wait") + message[: at + 12]))
                HeldClock.advance(0.9)
            assert (await slow.all()).endswith(b"\r\n\r\n12")
            assert app.left == []

    serve_on_held_clock(work, keep_alive=1)


def test_row_33_every_request_of_a_connection_hears_that_its_client_left() -> None:
    async def work(app: App, port: int) -> None:
        async with Peer(port) as peer:
            await peer.say(head("/wait/1") + head("/wait/2") + head("/wait/3"))
            while "/wait/1" not in app.begun:
                await app.changed.wait()
                app.changed.clear()
        async with asyncio.timeout(DEADLINE_S):
            while "/wait/1" not in app.left:
                await app.changed.wait()
                app.changed.clear()
        assert app.begun == ["/wait/1"], "nobody waits for the others any more"

    serve(work)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def work(app: App, port: int) -> None:
        async with Peer(port) as peer:
            await peer.say(b"".join(head(f"/{n}", f"content-length: {n}") + b"a" * n for n in range(1, 9)) + head("/9", "connection: close"))
            answer = await peer.all()
        assert [part[-1:] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"%d" % n for n in (*range(1, 9), 0)]

    serve(work)


def test_bytes_that_are_no_http_get_the_one_error_shape() -> None:
    async def work(app: App, port: int) -> None:
        for data in (b"\x00\xff\r\n\r\n", head("/x", "content-length: -1"), head("/x", "content-length: 1", "content-length: 2")):
            async with Peer(port) as peer:
                await peer.say(data)
                refused(await peer.all(), 400, "invalid_http")
        assert app.begun == []
        with socket.create_connection(("127.0.0.1", port)):
            pass  # a connection that is closed at once is nobody's error

    serve(work)
