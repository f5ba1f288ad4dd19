"""Rows SEC of the fault table that touch what exists (91, 92, 94, 95) on a real server with a key, and a detokenizer process of its own."""

from __future__ import annotations

import http.server
import os
import pickle
import socket
import stat
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fixtures.granted import Granted
from fixtures.live_server import tiny_flags, tiny_llama
from fixtures.wire import RawReader, assert_refused, connect, generation, request_bytes
from rootlet.bench.server_process import ServerProcess, running_server

pytestmark = pytest.mark.process

KEY = "sk-Correct.Horse_Battery-Staple"
WRONG_HEADERS: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"x-api-key": KEY[:-1]},
]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, private: Path) -> Iterator[ServerProcess]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROOTLET_API_KEY": KEY, "ROOTLET_RUNTIME_DIR": str(private)}
    model = tiny_llama(tmp_path_factory.mktemp("sec"))
    with running_server(str(model), *tiny_flags(), "--detokenizer", "process", env=environment) as made:
        yield made
        assert KEY not in made.log.read_text()
        assert "Traceback" not in made.log.read_text()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """With the key; afterwards the server is alive."""
    with httpx.Client(base_url=server.base, headers={"authorization": f"Bearer {KEY}"}, timeout=60.0, verify=False) as made:
        yield made
        with Granted() as clock:
            assert made.get("/health").status_code == 200
            assert clock.now_s() < 1.0
        assert made.post(PLAIN, json={"prompt": "a", "max_tokens": 8}).status_code == 200


@pytest.fixture
def clock() -> Iterator[Granted]:
    with Granted() as made:
        yield made


def _routes(client: httpx.Client) -> list[tuple[str, str]]:
    paths = client.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path.replace("{model_id}", "m").replace("{rid}", "r")) for path, methods in paths.items() for method in methods]
    return [*found, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/"), ("GET", "/nothing")]


def test_row_91_every_route_but_liveness_needs_the_key(server: ServerProcess, client: httpx.Client) -> None:
    open_routes = {"/health", "/ready"}
    for method, path in _routes(client):
        spellings = [path, path + "/", "/" + path, path + "?key=" + KEY, path.replace("e", "%65")]
        for spelling in spellings:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": KEY},
                {"authorization": f"Basic {KEY}"},
                {"x-api-key": KEY[:-1]},
            ):
                reply = httpx.request(method, server.base + spelling, headers=headers, json={}, timeout=60.0, verify=False)
                if path in open_routes:
                    assert reply.status_code != 401 or spelling.startswith("//")
                else:
                    assert_refused(reply, status=(401,))
                    assert reply.headers["www-authenticate"] == "Bearer"
    for method in ("HEAD", "OPTIONS", "PATCH", "TRACE"):
        assert httpx.request(method, server.base + PLAIN, timeout=60.0, verify=False).status_code == 401
    for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, {"api-key": KEY}):
        assert httpx.get(server.base + "/v1/models", headers=headers, timeout=60.0, verify=False).status_code == 200


def test_row_91_an_upgrade_is_no_way_around(server: ServerProcess) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")
    with connect(server.base) as raw:
        raw.sendall(request_bytes("/v1/models", method="GET", headers=upgrade))
        assert RawReader(raw).reply()[0] in (400, 401, 403, 404)


def test_row_91_the_key_is_nowhere_to_be_read(server: ServerProcess, client: httpx.Client) -> None:
    for path in ("/server_info", "/metrics", "/debug/state", "/model_info", "/"):
        assert KEY not in client.get(path).text
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert all(KEY not in " ".join(p.cmdline()) for p in processes)
    client.post(PLAIN, json={"prompt": "a", "max_tokens": 1, "user": "u"})
    assert KEY not in server.log.read_text()


def test_row_91_the_time_of_a_wrong_key_tells_nothing(server: ServerProcess, client: httpx.Client) -> None:
    """Medians of interleaved tries; the bound is the spread of the machine's noise."""
    wrong = {"first": "X" + KEY[1:], "last": KEY[:-1] + "X"}
    times: dict[str, list[float]] = {name: [] for name in wrong}
    for _ in range(150):
        for name, key in wrong.items():
            begun_s = time.perf_counter()
            assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 401
            times[name].append(time.perf_counter() - begun_s)
    first, last = (statistics.median(times[name]) for name in ("first", "last"))
    spread = statistics.quantiles(times["first"], n=4)
    assert abs(first - last) < max(spread[2] - spread[0], 2e-4)


def _processes(server: ServerProcess) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._marker), "w"))


def test_row_92_garbage_on_the_internal_sockets_runs_nothing(server: ServerProcess, client: httpx.Client, private: Path, tmp_path: Path) -> None:
    import zmq

    listening = {c.laddr[:2] for p in _processes(server) for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening == {("127.0.0.1", int(server.base.rsplit(":", 1)[1]))}
    (folder,) = private.glob("rootlet-*")
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    sockets = [path for path in folder.iterdir() if path.is_socket()]
    assert len(sockets) >= 3
    marker = tmp_path / "marker"
    frames = [b"", b"\x00" * 9, pickle.dumps(_Bomb(marker)), b"\xc1" * 1000, b"\xdd\xff\xff\xff\xff", bytes(range(256)) * 4096]
    context = zmq.Context()
    try:
        for path in sockets:
            with socket.socket(socket.AF_UNIX) as raw:  # bytes that are not even ZeroMQ
                raw.connect(str(path))
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            push = context.socket(zmq.PUSH)
            push.setsockopt(zmq.LINGER, 1000)
            push.connect(f"ipc://{path}")
            for frame in frames:
                push.send(frame)
            push.send_multipart(frames)
            push.close()
    finally:
        context.term()
    for _ in range(3):
        assert client.post(PLAIN, json={"prompt": "a", "max_tokens": 4}).status_code == 200
    assert not marker.exists()
    assert server.process.poll() is None


BOMB = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"


def test_row_94_a_request_brings_no_template(client: httpx.Client, clock: Granted) -> None:
    for path in (CHAT, "/tokenize"):
        base = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        begun_s = clock.now_s()
        assert_refused(client.post(path, json={**base, "chat_template": BOMB}), status=(400, 501))
        for name in (
            "chat_template",
            "tokenize",
            "messages",
            "tools",
            "padding",
            "return_dict",
            "add_generation_prompt",
            "bos_token",
            "raise_exception",
        ):
            error = assert_refused(client.post(path, json={**base, "chat_template_kwargs": {name: BOMB}}))
            assert name in str(error["param"])
        for name in ("__class__", "a.b", "a b", ""):
            assert_refused(client.post(path, json={**base, "chat_template_kwargs": {name: 1}}))
        assert client.post(path, json={**base, "chat_template_kwargs": {"enable_thinking": False}}).status_code == 200
        assert clock.now_s() - begun_s < 5.0


@pytest.fixture
def listener() -> Iterator[tuple[int, list[str]]]:
    """A web server on loopback that counts who calls."""
    calls: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made.server_address[1], calls
        made.shutdown()
        thread.join()


def test_row_95_no_address_in_a_request_is_ever_fetched(client: httpx.Client, listener: tuple[int, list[str]], clock: Granted) -> None:
    port, calls = listener
    hosts = [f"http://127.0.0.1:{port}/a", f"http://2130706433:{port}/b", f"http://[::1]:{port}/c", f"http://localhost:{port}/d"]
    urls = [*hosts, "http://169.254.169.254/latest", "file:///etc/passwd", "/etc/passwd", "data:image/png;base64," + "A" * 1_000_000]
    for url in urls:
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_image", "image_url": url},
        ):
            begun_s = clock.now_s()
            reply = client.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}], "max_tokens": 1})
            error = assert_refused(reply, status=(400, 501))
            assert "root:" not in error["message"]
            assert clock.now_s() - begun_s < 5.0
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": f"http://127.0.0.1:{port}/schema"}}}
    assert_refused(client.post(CHAT, json=generation(CHAT, "a", response_format=schema)), status=(400, 501))
    assert_refused(client.post(CHAT, json=generation(CHAT, "a", lora_path=f"http://127.0.0.1:{port}/lora")), status=(400, 501))
    assert calls == []
