"""Web pages of other origins, names that were made to point here, and the programs that must not notice any of it. HEAD wherever GET only looks."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from fixtures.asgi import call, error
from fixtures.fake_manager import FakeManager, config
from rootlet.engine.http import HttpServer
from rootlet.engine.listen import listen
from rootlet.server.app import ROUTES, build_app

DEADLINE_S = 60.0  # so that nothing hangs
HERE = "http://127.0.0.1:30000"
CHROME = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/131.0.0.0 Safari/537.36"
JSON = {"content-type": "application/json"}
# What changes the engine for everybody, with a body that is taken.
CONTROL = [
    ("GET", "/flush_cache", None), ("POST", "/flush_cache", None), ("POST", "/continue_generation", None),
    ("POST", "/pause_generation", b"{}"), ("POST", "/abort_request", b'{"abort_all":true}'),
    ("POST", "/cache/pin", b'{"text":"ab"}'), ("POST", "/cache/unpin", b'{"all":true}'),
]  # fmt: skip
FOREIGN: list[dict[str, str]] = [
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:3000"},
    {"sec-fetch-site": "cross-site", "origin": HERE},
    {"sec-fetch-site": "none", "origin": "chrome-extension://abc"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1"},
]
FRIENDS: list[dict[str, str]] = [
    {},
    {"user-agent": "curl/8.5.0"},
    {"user-agent": "python-requests/2.32.3"},
    {"user-agent": CHROME, "sec-fetch-site": "none"},  # typed into the address bar
    {"user-agent": CHROME, "sec-fetch-site": "same-origin", "origin": HERE},
    {"user-agent": CHROME, "sec-fetch-site": "same-origin", "origin": "https://llm.example"},  # behind a proxy that serves a page too
    {"origin": HERE},
]


def ask(manager: FakeManager, method: str, path: str, headers: dict[str, str], *, base: str = HERE, **server: Any) -> httpx.Response:
    """`base` is where the connection arrives, and the Host unless `headers` has another."""
    body = next((body for *case, body in CONTROL if case == [method, path]), None)
    kind = JSON if body else {}
    return call(build_app(manager, config(**server)), method, base + path, headers={**kind, **headers}, content=body)


def touched(manager: FakeManager) -> bool:
    return bool(manager.control.asked or manager.aborted or manager.flushed)


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize(("method", "path"), [case[:2] for case in CONTROL])
def test_a_page_of_another_origin_changes_nothing(method: str, path: str, headers: dict[str, str]) -> None:
    for spelling in (path, path + "/"):
        manager = FakeManager()
        error(ask(manager, method, spelling, {**JSON, **headers}), 403, code="cross_site")
        assert not touched(manager)


@pytest.mark.parametrize("headers", FRIENDS)
@pytest.mark.parametrize(("method", "path"), [case[:2] for case in CONTROL])
def test_programs_and_own_pages_meet_no_rule(method: str, path: str, headers: dict[str, str]) -> None:
    manager = FakeManager()
    assert ask(manager, method, path, headers).status_code == 200
    assert touched(manager)


def test_a_browser_that_does_not_say_where_it_comes_from_has_to_post() -> None:
    """Under a plain address of the network, or 0.0.0.0, browsers send no Sec-Fetch-Site, and no Origin with a GET."""
    for base, bound in (("http://192.168.1.5:30000", "0.0.0.0"), ("http://0.0.0.0:30000", "127.0.0.1")):
        manager = FakeManager()
        error(ask(manager, "GET", "/flush_cache", {"user-agent": CHROME}, base=base, host=bound), 403, code="cross_site")
        assert not touched(manager)
        assert ask(manager, "GET", "/flush_cache", {"user-agent": "curl/8.5.0"}, base=base, host=bound).status_code == 200


def test_no_route_but_those_closed_to_pages_does_anything_without_a_json_body() -> None:
    """What a page can send unasked: any text or nothing, without a content type of its choice. A new route that acts on that must be guarded."""
    for path, methods, _ in ROUTES:
        for method in set(methods) - {"GET"}:
            for content, kind in ((b"", None), (b"{}", "text/plain"), (b"{}", None)):
                manager = FakeManager()
                headers = {"origin": "https://evil.example", **({"content-type": kind} if kind else {})}
                response = call(build_app(manager, config()), method, HERE + path, headers=headers, content=content)
                assert response.status_code in (403, 415), (method, path, content, kind, response.text)
                assert not touched(manager)
                assert manager.requests == []


def test_generation_from_a_page_goes_through_a_proxy_that_answers_for_cors() -> None:
    response = call(
        build_app(FakeManager(), config()),
        "POST",
        HERE + "/v1/completions",
        json={"prompt": "x"},
        headers={"origin": "https://webui.example", "sec-fetch-site": "cross-site"},
    )
    assert response.status_code == 200


@pytest.mark.parametrize("host", [
    "localhost", "localhost:30000", "LOCALHOST:1", "localhost.", "model.localhost:30000", "127.0.0.1", "127.0.0.1:30000", "127.8.9.1", "[::1]:30000",
    "[::1]", "10.0.0.7:8000", "[fe80::1]:80", "",
])  # fmt: skip
def test_a_local_server_answers_to_loopback_names_and_to_addresses(host: str) -> None:
    for bound in ("127.0.0.1", "localhost", "::1"):
        base = "http://[::1]:30000" if ":" in bound else HERE
        assert ask(FakeManager(), "GET", "/v1/models", {"host": host}, base=base, host=bound).status_code == 200


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:30000", "127.0.0.1.evil.example", "localhost.evil.example:30000", "evillocalhost", "127.0.0.1@evil.example",
    "localhost:80:80", "[evil.example]:1", "127.0.0.1:x", "\u00e9vil",
])  # fmt: skip
def test_a_local_server_answers_to_no_other_name(host: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/continue_generation"), ("GET", "/flush_cache"), ("GET", "/nothing"), ("GET", "/")):
        manager = FakeManager()
        refused = error(ask(manager, method, path, {"host": host.encode("latin-1")}), 403, code="foreign_host")  # type: ignore[dict-item]
        assert "--api-key" in refused["message"]
        assert not touched(manager)


def test_where_any_name_is_fine() -> None:
    evil = {"host": "llm.example"}
    assert ask(FakeManager(), "GET", "/v1/models", evil, base="http://192.168.1.5:30000", host="0.0.0.0").status_code == 200
    assert ask(FakeManager(), "GET", "/v1/models", evil, host="0.0.0.0").status_code == 200  # a proxy beside it
    assert ask(FakeManager(), "GET", "/v1/models", evil, host="LLM.example").status_code == 200  # what --host says
    assert ask(FakeManager(), "GET", "/health", evil).status_code == 200  # liveness, as without a key
    keyed = {**evil, "authorization": "Bearer sesame"}
    assert ask(FakeManager(), "GET", "/v1/models", keyed, api_key="sesame").status_code == 200
    assert ask(FakeManager(), "GET", "/v1/models", evil, api_key="sesame").status_code == 401


def test_two_hosts_are_as_good_as_the_worse_one() -> None:
    app = build_app(FakeManager(), config())
    both = [("host", "localhost"), ("host", "evil.example")]
    error(call(app, "GET", HERE + "/v1/models", headers=both), 403, code="foreign_host")


@pytest.mark.parametrize("path", [
    "/health", "/ready", "/health_generate", "/v1/models", "/v1/models/tiny", "/models", "/metrics", "/server_info", "/get_model_info",
    "/cache/stats", "/", "/openapi.json",
])  # fmt: skip
def test_head_is_answered_as_get(path: str) -> None:
    app = build_app(FakeManager(), config())
    asked, looked = call(app, "HEAD", HERE + path), call(app, "GET", HERE + path)
    assert asked.status_code == looked.status_code == 200
    assert asked.headers["content-type"] == looked.headers["content-type"]


def test_head_tells_what_is_wrong_and_changes_nothing() -> None:
    manager = FakeManager()
    manager.status = "loading"
    app = build_app(manager, config())
    assert call(app, "HEAD", "/ready").status_code == 503
    assert call(app, "HEAD", "/v1/models/other").status_code == 404
    refused = call(app, "HEAD", "/flush_cache")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, POST")
    assert call(app, "HEAD", "/v1/completions").status_code == 405
    assert not touched(manager)


def test_on_real_sockets_of_one_connection() -> None:
    """Where a connection arrived is known there, and a HEAD without a body leaves the connection in step."""
    seen: list[tuple[int, bytes]] = []

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for line, host in (
            ("HEAD /v1/models", "localhost"), ("GET /v1/models", "evil.example"), ("HEAD /v1/models", "evil.example"),
            ("HEAD /flush_cache", "localhost"), ("GET /flush_cache", "localhost"), ("GET /flush_cache", "evil.example"),
            ("GET /v1/models", f"127.0.0.1:{port}"),
        ):  # fmt: skip
            writer.write(f"{line} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
            assert length > 0
            seen.append((int(head.split()[1]), b"" if line.startswith("HEAD") else await reader.readexactly(length)))
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        seen.append((int((await asyncio.wait_for(reader.read(), DEADLINE_S)).split()[1]), b""))
        writer.close()

    async def go() -> None:
        sock = listen("127.0.0.1", 0)
        server = HttpServer(build_app(FakeManager(), config()), config().server)
        running = asyncio.create_task(server.run_on(sock))
        try:
            await talk(sock.getsockname()[1])
        finally:
            server.stop(0.0)
            await running
            sock.close()

    asyncio.run(go())
    assert [status for status, _ in seen] == [200, 403, 403, 405, 200, 403, 200, 200]
    assert b"foreign_host" in seen[1][1]
    assert b'"tiny"' in seen[6][1]
