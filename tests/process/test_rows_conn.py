"""Rows CONN of the fault table (33, 35, 36, 37, 39) on real sockets: clients that leave, wait, read slowly, talk nonsense, or come in hundreds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from fixtures.chain_model import Chain, make_chain
from fixtures.granted import Granted, until
from fixtures.live_server import Live, held, live, tiny_flags
from fixtures.wire import HealthProbe, RawReader, assert_refused, connect, events_of, generation, joined, post, request_bytes, stream, whole

pytestmark = pytest.mark.process

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
LOOP = "我很好🧑‍🚀éไทย가 αβγδ Конец"
KEEP_ALIVE_S = 5
STALL_S = 2


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("conn"), LOOP, loops=True, context_len=8192)


@pytest.fixture(scope="module")
def narrow(chain: Chain) -> Iterator[Live]:
    """Two requests at a time."""
    with live(chain.folder, *tiny_flags(ctx=8192, pool=40_000, running=2), check=False) as made:
        yield made


@pytest.fixture(scope="module")
def wide(chain: Chain) -> Iterator[Live]:
    flags = (*tiny_flags(ctx=8192, pool=120_000, running=16), "--max-queue", "100")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))  # what a login shell gives; the server has to raise it
    try:
        with live(chain.folder, *flags, check=False) as made:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            yield made
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def impatient(chain: Chain) -> Iterator[Live]:
    """Gives up soon. Only for tests of just that: whoever is held up by a busy machine meets the same."""
    flags = (*tiny_flags(ctx=8192, pool=40_000, running=4), "--keep-alive", str(KEEP_ALIVE_S), "--stall-timeout", str(STALL_S))
    with live(chain.folder, *flags, check=False) as made:
        yield made


# ---- 33: clients that leave ----------------------------------------------------------------------------------------------------------------------


def _leave(raw: socket.socket, how: str) -> None:
    if how == "RST":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


LEAVERS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True}, "whole": {"stream": False}, "n": {"stream": True, "n": 4}, "batch": {"stream": True, "prompt": ["a"] * 16},
    "prefill": {"stream": True, "prompt": "z" * 8000},
}  # fmt: skip


@pytest.mark.parametrize("how", ["FIN", "RST"])
@pytest.mark.parametrize("kind", list(LEAVERS))
def test_row_33_who_leaves_frees_the_place(narrow: Live, chain: Chain, kind: str, how: str) -> None:
    base = narrow.server.base
    body = {"prompt": chain.play(0), "max_tokens": 4000 if kind != "prefill" else 100, "ignore_eos": True, **LEAVERS[kind]}
    with held(narrow.server) as inside:
        raws = [connect(base) for _ in range(4)]  # two will run, two wait
        for raw in raws:
            raw.sendall(request_bytes(PLAIN, body))
        inside(4 * 16 if kind == "batch" else 4)
        steps = narrow.state()["steps"]
    until(lambda: narrow.state()["steps"] > steps + 2, "a few steps", 60.0)
    if kind == "stream":
        assert raws[0].recv(1)
    lines = len(narrow.server.log.read_text().splitlines())
    for raw in raws:
        _leave(raw, how)
    with Granted() as clock, connect(base) as raw:
        raw.sendall(request_bytes(PLAIN, generation(PLAIN, chain.play(0), max_tokens=4, stream=True)))
        raw.recv(1)
        assert clock.now_s() < 3.0
    until(lambda: narrow.metrics()["rootlet_running_requests"] == 0, "idle", 3.0)
    narrow.assert_exact()
    assert len(narrow.server.log.read_text().splitlines()) - lines <= 1


# ---- 35: connections that wait -------------------------------------------------------------------------------------------------------------------


def test_row_35_an_idle_connection_is_kept(wide: Live, chain: Chain) -> None:
    """By the default, which is above a minute: however long a busy machine stretches these waits."""
    body = generation(PLAIN, chain.play(0), max_tokens=2)
    with connect(wide.server.base) as raw:
        reader = RawReader(raw)
        for wait_s in (0.0, 0.3, 2.0):
            threading.Event().wait(wait_s)
            raw.sendall(request_bytes(PLAIN, body))
            assert reader.reply()[0] == 200


def test_row_35_an_idle_connection_is_closed_cleanly_after_its_time_and_not_before(impatient: Live, chain: Chain) -> None:
    with connect(impatient.server.base) as raw, Granted() as clock:
        reader = RawReader(raw)
        sent_s = time.monotonic()  # the server's time begins later: with its reply
        raw.sendall(request_bytes(PLAIN, generation(PLAIN, chain.play(0), max_tokens=2)))
        assert reader.reply()[0] == 200
        replied_s = clock.now_s()
        assert reader.at_end()  # a FIN, no reset
        assert time.monotonic() - sent_s > 0.9 * KEEP_ALIVE_S
        assert clock.now_s() - replied_s < KEEP_ALIVE_S + 5.0


def test_row_35_pipelined_requests_and_http_1_0(wide: Live, chain: Chain) -> None:
    bodies = [generation(PLAIN, chain.play(0), max_tokens=n) for n in (3, 5)]
    with connect(wide.server.base) as raw:
        raw.sendall(b"".join(request_bytes(PLAIN, body) for body in bodies))
        reader = RawReader(raw)
        for n in (3, 5):
            status, _, content = reader.reply()
            assert status == 200
            assert b'"completion_tokens":%d' % n in content
    for headers in ((), ("Connection: keep-alive",)):
        with connect(wide.server.base) as raw:
            raw.sendall(request_bytes("/health", method="GET", version="1.0", headers=headers))
            assert RawReader(raw).reply()[0] == 200
    with connect(wide.server.base) as raw:  # no chunked encoding for 1.0: the end of the connection is the end of the stream
        raw.sendall(request_bytes(PLAIN, {**bodies[0], "stream": True}, version="1.0"))
        content = b""
        while part := raw.recv(65536):
            content += part
        head, _, events = content.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert events_of(events)


def _pool(live_server: Live, chain: Chain, *, connections: int, rounds: int, longest_s: float) -> None:
    rng = random.Random(5)
    waits = [[rng.uniform(0.0, longest_s) for _ in range(rounds)] for _ in range(connections)]
    body = generation(PLAIN, chain.play(0), max_tokens=1)

    async def one(waits_s: list[float]) -> None:
        limits = httpx.Limits(max_keepalive_connections=1, max_connections=1, keepalive_expiry=3600.0)
        async with httpx.AsyncClient(base_url=live_server.server.base, limits=limits, timeout=240.0, verify=False) as client:
            for wait_s in waits_s:
                assert (await client.post(PLAIN, json=body)).status_code == 200
                await asyncio.sleep(wait_s)

    async def run() -> None:
        await asyncio.gather(*map(one, waits))

    asyncio.run(run())


def test_row_35_pooled_connections_with_random_waits(wide: Live, chain: Chain) -> None:
    _pool(wide, chain, connections=30, rounds=4, longest_s=1.5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_row_35_at_full_size(narrow: Live, chain: Chain) -> None:
    """The default keep-alive is above 60 s."""
    with connect(narrow.server.base) as raw:
        reader = RawReader(raw)
        for k in range(50):
            raw.sendall(request_bytes(PLAIN, generation(PLAIN, chain.play(0), max_tokens=1)))
            assert reader.reply()[0] == 200
            threading.Event().wait((6.0, 20.0, 60.0)[k] if k < 3 else 6.0)
    _pool(narrow, chain, connections=200, rounds=3, longest_s=60.0)


# ---- 36: readers that are slow -------------------------------------------------------------------------------------------------------------------


def _read_slowly(base: str, body: dict[str, Any], *, bytes_a_read: int, wait_s: float) -> str:
    pause = threading.Event()
    with connect(base, receive_bytes=4096) as raw:
        raw.sendall(request_bytes(PLAIN, {**body, "stream": True}, version="1.0"))
        content = bytearray()
        while part := raw.recv(bytes_a_read):
            content += part
            pause.wait(wait_s)
    return joined(events_of(bytes(content).partition(b"\r\n\r\n")[2]))


def _slow_readers(wide: Live, chain: Chain, *, readers: int, num_tokens: int, bytes_a_read: int, wait_s: float) -> None:
    base = wide.server.base
    body = generation(PLAIN, chain.play(0), max_tokens=num_tokens, ignore_eos=True)
    wanted = whole(base, PLAIN, body)["choices"][0]["text"]
    normal = generation(PLAIN, chain.play(0), max_tokens=200, ignore_eos=True)
    with Granted() as clock:
        stream(base, PLAIN, normal)
        alone_s = clock.now_s()
    before = _memory(wide)
    with ThreadPoolExecutor(readers + 5) as pool:
        slow = [pool.submit(_read_slowly, base, body, bytes_a_read=bytes_a_read, wait_s=wait_s) for _ in range(readers)]
        with Granted() as clock:
            beside = [pool.submit(stream, base, PLAIN, normal) for _ in range(5)]
            texts = [joined(f.result()) for f in beside]
            beside_s = clock.now_s()
        grown = _memory(wide) - before
        assert all(f.result() == wanted for f in slow)
    assert texts == [wanted[: len(texts[0])]] * 5
    assert beside_s < 20 * alone_s + 5.0
    assert grown < 64 << 20
    wide.assert_live()


def _memory(server: Live) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in [server.main_pid, *server.pids])


def test_row_36_slow_readers_get_the_whole_text(wide: Live, chain: Chain) -> None:
    _slow_readers(wide, chain, readers=6, num_tokens=300, bytes_a_read=4096, wait_s=0.02)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_row_36_at_full_size(narrow: Live, chain: Chain) -> None:
    _slow_readers(narrow, chain, readers=20, num_tokens=2000, bytes_a_read=200, wait_s=0.05)


def test_row_36_a_reader_that_takes_nothing_is_cut_after_the_documented_time(impatient: Live, chain: Chain) -> None:
    """The kernel's buffers take megabytes before the server feels it, so the events are fat."""
    base, before = impatient.server.base, _memory(impatient)
    body = generation(PLAIN, chain.play(0), max_tokens=8000, ignore_eos=True, logprobs=20, stream=True)
    sockets, ended = _connections(impatient), _ended(impatient)
    with connect(base, receive_bytes=4096) as raw:
        raw.sendall(request_bytes(PLAIN, body))
        until(lambda: _ended(impatient) > ended and impatient.metrics()["rootlet_requests_in_flight"] == 0, "the end of the request", 40.0)
        until(lambda: _connections(impatient) <= sockets, "the end of its connection", 10.0)
        content = b""
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(1 << 20):
                content += part
        assert b"[DONE]" not in content
    assert _memory(impatient) - before < 96 << 20
    impatient.assert_live()


def _ended(server: Live) -> float:
    """Requests so far whose generation is over: aborted, or at its length, when all the rest was waiting to be sent in one piece."""
    return sum(value for name, value in server.metrics().items() if name.startswith("rootlet_requests_total"))


def _connections(server: Live) -> int:
    return len([c for c in psutil.Process(server.main_pid).net_connections("inet") if c.status == psutil.CONN_ESTABLISHED])


# ---- 37: bodies that are nonsense ----------------------------------------------------------------------------------------------------------------

BODIES: dict[str, bytes] = {
    "broken": b"{bad", "empty": b"", "array": b"[]", "string": b'"x"', "null": b"null", "deep": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "deep list": b"[" * 1000 + b"]" * 1000, "twice": b'{"prompt":"a","prompt":"b"}', "utf-16": '{"prompt":"x"}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"prompt":"x"}',
}  # fmt: skip


def _post_routes(base: str) -> list[str]:
    """Those that need a body; the others (flush, continue) take none."""
    paths = httpx.get(base + "/openapi.json", timeout=60.0, verify=False).json()["paths"]
    return [path for path, methods in paths.items() if methods.get("post", {}).get("requestBody", {}).get("required")]


def test_row_37_every_post_route_refuses_every_bad_body(wide: Live) -> None:
    base = wide.server.base
    routes = _post_routes(base)
    assert {PLAIN, CHAT, "/generate", "/tokenize", "/detokenize"} <= set(routes)
    for path in routes:
        for content in BODIES.values():
            assert_refused(post(base, path, content))
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=latin1"):
            assert_refused(post(base, path, b'{"prompt":"x"}', headers={"content-type": kind}), status=(415,))
        zipped = post(base, path, gzip.compress(b'{"prompt":"x"}'), headers={"content-encoding": "gzip"})
        assert_refused(zipped, status=(415,))
        for method in ("GET", "PUT", "DELETE"):
            if not (path == "/generate" and method == "PUT"):
                refused = httpx.request(method, base + path, timeout=60.0, verify=False)
                assert_refused(refused, status=(405,))
                assert "POST" in refused.headers["allow"]
    assert_refused(post(base, "/v1/nothing", b"{}"), status=(404,))
    for wanted in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}, {}, {"type": "nothing"}):
        assert_refused(post(base, CHAT, generation(CHAT, "a", response_format=wanted)))
    assert httpx.post(base + PLAIN, content=b'{"prompt":"x","max_tokens":1}', timeout=60.0, verify=False).status_code == 200  # no content type at all
    wide.assert_live()


def test_row_37_wrong_lengths_and_bytes_that_are_no_http(wide: Live) -> None:
    body = b'{"prompt":"x","max_tokens":1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    for wrong in (b"abc", b"-1", b"1e3", b"99999999999999999999999"):
        with connect(wide.server.base) as raw:
            raw.sendall(head + wrong + b"\r\n\r\n" + body)
            status, headers, content = RawReader(raw).reply()
            assert (status, headers["content-type"]) in ((400, "application/json"), (413, "application/json")), content
            assert b'"error"' in content
    with connect(wide.server.base) as raw:  # shorter than the body: what is left over is no request
        raw.sendall(head + b"%d\r\n\r\n" % (len(body) - 4) + body)
        reader = RawReader(raw)
        assert reader.reply()[0] == 400
    with connect(wide.server.base) as raw:  # longer than the body, and then gone
        raw.sendall(head + b"%d\r\n\r\n" % (len(body) + 4) + body)
        raw.shutdown(socket.SHUT_WR)
    for noise in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with connect(wide.server.base) as raw:
            raw.sendall(noise)
            status, headers, content = RawReader(raw).reply()
            assert (status, headers["content-type"]) == (400, "application/json"), content
    wide.assert_live()


# ---- 39: connections in crowds -------------------------------------------------------------------------------------------------------------------


def _crowd(wide: Live, chain: Chain, *, idle: int, at_once: int) -> None:
    base = wide.server.base
    body = generation(PLAIN, chain.play(0), max_tokens=1)
    fds = psutil.Process(wide.main_pid).num_fds()
    held = [connect(base) for _ in range(idle)]
    with HealthProbe(base) as probe:

        async def one(client: httpx.AsyncClient, k: int) -> int:
            try:
                async with asyncio.timeout(0.02 if k % 2 and k > at_once else None):
                    reply = await client.post(PLAIN, json=body if k <= at_once else {**body, "max_tokens": 200, "ignore_eos": True})
            except TimeoutError:
                return 0
            assert reply.status_code in (200, 503), reply.text
            if reply.status_code == 503:
                assert reply.json()["error"]["code"] == "queue_full"
                assert int(reply.headers["retry-after"]) >= 1
            return reply.status_code

        async def run(first: int, count: int) -> list[int]:
            async with httpx.AsyncClient(base_url=base, limits=httpx.Limits(max_connections=None), timeout=240.0, verify=False) as client:
                return list(await asyncio.gather(*(one(client, first + k) for k in range(count))))

        short = asyncio.run(run(1, at_once))
        queued = asyncio.run(run(at_once + 1, at_once))  # half of them leave at once
    assert len(short) == len(queued) == at_once
    assert short.count(200) > 0
    assert probe.worst_s < 1.5
    for raw in held:
        raw.close()
    until(lambda: psutil.Process(wide.main_pid).num_fds() <= fds + 5, "the file descriptors", 15.0)
    wide.assert_live()


def test_row_39_the_soft_limit_was_raised(wide: Live) -> None:
    soft, hard = psutil.Process(wide.main_pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft > 1024 or soft == hard


def test_row_39_a_crowd_is_answered_or_told_to_retry(wide: Live, chain: Chain) -> None:
    _crowd(wide, chain, idle=200, at_once=150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_row_39_at_full_size(wide: Live, chain: Chain) -> None:
    _crowd(wide, chain, idle=3000, at_once=2000)
