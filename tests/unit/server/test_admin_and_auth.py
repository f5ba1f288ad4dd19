"""Operators' routes, the key, and the OpenAPI document."""

from __future__ import annotations

import asyncio

import pytest

from fixtures.asgi import Wire, call, error, post
from fixtures.fake_manager import FakeManager, Script, config
from rootlet.core.types import Finish, FinishKind
from rootlet.ipc.messages import FlushCacheReqOutput, LoadProgress
from rootlet.server.app import ROUTES, build_app, with_head
from rootlet.server.middleware import normalise

KEY = "s3cret-key"


def loading() -> FakeManager:
    manager = FakeManager()
    manager.status = "loading"
    manager.progress = LoadProgress("map weights", 0.425, "1.2 GB/s", 3.5)
    manager.ready_info = None
    manager.served_names = ()
    return manager


def test_liveness_is_cheap_and_true_while_loading_readiness_is_not() -> None:
    app = build_app(loading(), config())
    assert call(app, "GET", "/health").status_code == 200
    response = call(app, "GET", "/ready")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    body = response.json()
    assert (body["status"], body["phase"], body["percent"]) == ("loading", "map weights", 42.5)
    for path, payload in (("/v1/completions", {"prompt": "x"}), ("/generate", {"text": "x"}), ("/tokenize", {"prompt": "x"})):
        refused = post(app, path, payload)
        error(refused, 503, code="loading")
        assert "retry-after" in refused.headers
    assert call(app, "GET", "/v1/models").json() == {"object": "list", "data": []}
    info = call(app, "GET", "/get_server_info").json()
    assert (info["internal_states"], info["num_open_requests"]) == ([], 0)
    assert "rootlet_engine_up 0.0" in call(app, "GET", "/metrics").text


@pytest.mark.parametrize(("status", "code"), [("draining", "shutting_down"), ("dead", "engine_dead")])
def test_draining_and_dead_engines_take_nothing_new(status: str, code: str) -> None:
    manager = FakeManager()
    manager.status = status
    manager.alive = (status != "dead", status)
    app = build_app(manager, config())
    error(post(app, "/v1/completions", {"prompt": "x"}), 503, code=code)
    assert call(app, "GET", "/ready").status_code == 503
    assert call(app, "GET", "/health").status_code == (503 if status == "dead" else 200)


def test_ready_and_models() -> None:
    manager = FakeManager()
    manager.served_names = ("org/model", "alias")
    app = build_app(manager, config())
    assert call(app, "GET", "/ready").status_code == 200
    listed = call(app, "GET", "/v1/models").json()["data"]
    assert [m["id"] for m in listed] == ["org/model", "alias"]
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"} <= listed[0].keys()
    assert call(app, "GET", "/v1/models/org/model").json() == listed[0]
    error(call(app, "GET", "/v1/models/other"), 404, code="model_not_found")
    error(post(app, "/v1/completions", {"prompt": "x", "model": "other"}), 404, code="model_not_found", param="model")
    assert post(app, "/v1/completions", {"prompt": "x", "model": "alias"}).json()["model"] == "alias"
    assert post(app, "/v1/completions", {"prompt": "x"}).json()["model"] == "org/model"
    manager.served_names = ("only",)
    assert post(app, "/v1/completions", {"prompt": "x", "model": "/some/path"}).json()["model"] == "only"


def test_the_deep_probe_makes_a_token_when_idle_and_reads_progress_when_busy() -> None:
    manager = FakeManager()
    app = build_app(manager, config())
    assert call(app, "GET", "/health_generate").json()["status"] == "ok"
    assert manager.requests[0].sampling.max_new_tokens == 1
    manager.scripts = [Script((), finish=Finish(FinishKind.ERROR, status=500, message="nan"))]
    error(call(app, "GET", "/health_generate"), 500)

    async def busy() -> None:
        manager = FakeManager([Script(("a", "b"), hold={1: asyncio.Event()})])
        app = build_app(manager, config())
        stream = Wire("/v1/completions", {"prompt": "x", "stream": True})
        task = asyncio.create_task(app(stream.scope, stream.receive, stream.send))
        await stream.arrived.wait()
        probe = Wire("/health_generate", {}, method="GET")
        await app(probe.scope, probe.receive, probe.send)
        assert '"busy"' in probe.text
        assert len(manager.requests) == 1
        stream.leave()
        await task

    asyncio.run(busy())


def test_flush_abort_and_debug() -> None:
    manager = FakeManager()
    app = build_app(manager, config())
    for method in ("GET", "POST"):
        response = call(app, method, "/flush_cache?timeout=2.5")
        assert response.status_code == 200
        assert "2.5" in response.text
    manager.flush = FlushCacheReqOutput("f", False, "2 requests are running")
    error(call(app, "GET", "/flush_cache"), 400, code="cache_busy")
    for bad in ("x", "-1", "nan", "inf", "1e9"):
        error(call(app, "GET", f"/flush_cache?timeout={bad}"), 400, param="timeout")
    assert post(app, "/abort_request", {"rid": "r"}).status_code == 200
    assert post(app, "/abort_request", {"abort_all": True}).status_code == 200
    assert manager.aborted == [("r", False), (None, True)]
    for body in ({}, {"rid": 5}, {"rid": ""}, {"abort_all": "yes"}):
        error(post(app, "/abort_request", body), 400)
    manager.states["state"] = {"tree": "."}
    manager.states["request"] = {"request": {"rid": "r", "phase": "decode"}}
    assert call(app, "GET", "/debug/state").json()["tree"] == "."
    assert call(app, "GET", "/debug/requests/r").json() == {"rid": "r", "phase": "decode"}
    manager.states["request"] = {}  # what the scheduler says of an id that it does not know
    refused = call(app, "GET", "/debug/requests/none")
    error(refused, 404, code="request_not_found")
    assert "'none'" in refused.text  # which one, and where people find the id that is meant (not the X-Request-Id)
    assert "`id` of its reply" in refused.text


def test_information_never_shows_the_key() -> None:
    app = build_app(FakeManager(), config(api_key=KEY))
    headers = {"authorization": f"Bearer {KEY}"}
    for path in ("/get_server_info", "/server_info", "/model_info", "/get_model_info", "/", "/openapi.json", "/metrics", "/debug/state"):
        response = call(app, "GET", path, headers=headers)
        assert response.status_code == 200, path
        assert KEY not in response.text
    info = call(app, "GET", "/server_info", headers=headers).json()
    assert info["config"]["server"]["api_key"] is True
    assert info["internal_states"] == [{"steps": 3}]
    assert info["max_total_num_tokens"] == 1024
    model = call(app, "GET", "/get_model_info", headers=headers).json()
    assert model["is_generation"] is True
    assert model["model_path"] == "tiny"


def test_every_route_but_liveness_asks_for_the_key() -> None:
    app = build_app(FakeManager(), config(api_key=KEY))
    open_routes = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready"), ("HEAD", "/ready"), ("HEAD", "/")}
    paths = [(m, p.replace("{model_id:path}", "tiny").replace("{rid:path}", "r")) for p, methods, _ in ROUTES for m in with_head(p, methods)]
    extra = [
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nope"),
        ("GET", "/chat/completions"),
        ("OPTIONS", "/generate"),
        ("GET", "/health/x"),
    ]
    for method, path in paths + extra:
        response = call(app, method, path)
        if (method, path) in open_routes:
            assert response.status_code == 200
            continue
        assert response.status_code == 401, (method, path)
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    assert call(app, "GET", "/health/").status_code == 200


@pytest.mark.parametrize(("headers", "status"), [
    ({"authorization": f"Bearer {KEY}"}, 200), ({"authorization": f"bearer  {KEY}"}, 200), ({"x-api-key": KEY}, 200), ({"api-key": KEY}, 200),
    ({"authorization": KEY}, 401), ({"authorization": f"Basic {KEY}"}, 401), ({"authorization": "Bearer "}, 401), ({"x-api-key": KEY + "x"}, 401),
    ({"x-api-key": KEY[:-1]}, 401), ({"authorization": "Bearer wrong", "x-api-key": KEY}, 200),
])  # fmt: skip
def test_the_key_comes_in_three_headers(headers: dict[str, str], status: int) -> None:
    response = call(build_app(FakeManager(), config(api_key=KEY)), "GET", "/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        error(response, 401, code="invalid_api_key")
        assert KEY not in response.text


def test_head_and_root() -> None:
    app = build_app(FakeManager(), config())
    assert call(app, "HEAD", "/health").content == b""
    assert call(app, "HEAD", "/").status_code == 200
    assert call(app, "GET", "/").json()["name"] == "rootlet"


@pytest.mark.parametrize(("path", "expected"), [
    ("/", "/"), ("", "/"), ("//", "/"), ("/health//", "/health"), ("/models", "/v1/models"), ("/models/a/b", "/v1/models/a/b"),
    ("/completions/", "/v1/completions"), ("/v1/completions", "/v1/completions"), ("/modelsx", "/modelsx"),
])  # fmt: skip
def test_paths_have_one_spelling(path: str, expected: str) -> None:
    assert normalise(path) == expected


def test_the_openapi_document_lists_every_route_once() -> None:
    document = call(build_app(FakeManager(), config()), "GET", "/openapi.json").json()
    for path, methods, _ in ROUTES:
        entry = document["paths"][path.replace(":path", "")]
        assert {m.lower() for m in methods} == entry.keys()
        assert all(operation["summary"] for operation in entry.values())
    ids = [operation["operationId"] for entry in document["paths"].values() for operation in entry.values()]
    assert len(ids) == len(set(ids))
