"""Bodies that are no JSON object, wrong paths and methods, headers: always the one envelope, never a 500."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import orjson
import pytest

from fixtures.asgi import call, error, post
from fixtures.fake_manager import FakeManager, Script, config
from rootlet.core.errors import InvalidValue
from rootlet.server import body as bodies
from rootlet.server.app import build_app
from rootlet.server.body import parse_object

POSTS = ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort_request"]
BAD_BODIES: dict[str, tuple[bytes, str | None]] = {
    "broken": (b"{bad", None), "empty": (b"", None), "blank": (b"  \n", None), "array": (b"[]", None), "string": (b'"x"', None),
    "null": (b"null", None),
    "number": (b"5", None), "deep": (b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}", None), "deeper": (b"[" * 100_000, None),
    "nested 200": (b'{"a":' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", None), "twice": (b'{"prompt":"a","prompt":"b"}', "prompt"),
    "inner twice": (b'{"a":{"b":1,"b":2}}', "b"), "utf-16": ('{"prompt":"x"}'.encode("utf-16"), None), "bom": (b'\xef\xbb\xbf{"prompt":"x"}', None),
    "latin": (b'{"prompt":"\xe9"}', None), "surrogate": (b'{"prompt":"\\ud800"}', None), "nan": (b'{"x":[1,NaN]}', "x[1]"),
    "infinity": (b'{"x":{"y":-Infinity}}', "x.y"), "huge": (b'{"x":1e999}', "x"), "digits": (b'{"x":' + b"1" * 5000 + b"}", None),
}  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", list(BAD_BODIES))
def test_row_37_bodies_that_are_no_json_object_are_400(path: str, name: str) -> None:
    raw, param = BAD_BODIES[name]
    error(post(build_app(FakeManager(), config()), path, raw), 400, param=param)


def test_keys_that_look_like_text_are_no_duplicates() -> None:
    assert parse_object(rb'{"a":"\"b\": \"a\":","b":{"a":1},"c\\":[{"a":2}]}') == {"a": '"b": "a":', "b": {"a": 1}, "c\\": [{"a": 2}]}
    with pytest.raises(InvalidValue, match="twice"):
        parse_object(rb'{"a":"\":","b":1,"b":2}')


@pytest.mark.parametrize(("headers",
"status"), [
    ({"content-type": "text/plain"}, 415), ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ({"content-type": "multipart/form-data"}, 415),
    ({"content-type": "application/json; charset=latin1"}, 415), ({"content-type": "application/json; charset=utf-16"}, 415),
    ({"content-encoding": "gzip"}, 415), ({"content-type": "application/json; charset=UTF-8"}, 200),
    ({"content-type": "application/vnd.x+json"}, 200),
    ({"content-type": ""}, 200), ({"content-type": "", "origin": "http://elsewhere.test"}, 415), ({"origin": "http://elsewhere.test"}, 200),
])  # fmt: skip
def test_row_37_media_types(headers: dict[str, str], status: int) -> None:
    raw = gzip.compress(b'{"prompt":"x"}') if "content-encoding" in headers else b'{"prompt":"x"}'
    response = post(build_app(FakeManager(), config()), "/v1/completions", raw, headers=headers)
    assert response.status_code == status
    if status == 415:
        error(response, 415)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH", "PUT"])
def test_row_37_wrong_methods_are_405_with_the_right_ones(path: str, method: str) -> None:
    if (path, method) == ("/generate", "PUT"):
        return
    response = call(build_app(FakeManager(), config()), method, path)
    error(response, 405, code="method_not_allowed")
    assert "POST" in response.headers["allow"]


def test_allow_names_all_methods_of_a_path() -> None:
    app = build_app(FakeManager(), config())
    assert call(app, "GET", "/generate").headers["allow"] == "POST, PUT"
    assert call(app, "POST", "/health").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/nope", "/v1/chat", "/../etc", "/" + "x" * 5000])
def test_unknown_paths_are_404_and_long_ones_are_not_echoed(path: str) -> None:
    response = call(build_app(FakeManager(), config()), "GET", path)
    error(response, 404)
    assert len(response.content) < 500


def test_bodies_over_the_limit_are_413_announced_or_not() -> None:
    app = build_app(FakeManager(), config(max_body_mib=1))
    big = b'{"prompt":"' + b"x" * 2**20 + b'"}'
    error(post(app, "/v1/completions", big), 413, code="request_too_large")

    async def parts() -> Any:
        for _ in range(3):
            yield b"x" * 2**19

    import asyncio

    import httpx

    async def go() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://t") as client:
            return await client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})

    error(asyncio.run(go()), 413)


def test_huge_bad_values_are_not_sent_back() -> None:
    app = build_app(FakeManager(), config())
    for body in (
        {"prompt": "x", "temperature": "y" * 100_000},
        {"prompt": "x", "stop": [["z" * 9999]] * 1000},
        {"prompt": "x", "logit_bias": {"k" * 9999: 1}},
    ):
        error(post(app, "/v1/completions", body), 400)


def test_request_ids_come_back_or_are_made() -> None:
    app = build_app(FakeManager(), config())
    response = post(app, "/v1/completions", {"prompt": "x"}, headers={"x-request-id": "abc-1.2:3_"})
    assert response.headers["x-request-id"] == "abc-1.2:3_"
    assert response.headers["openai-version"] == "2020-10-01"
    assert int(response.headers["openai-processing-ms"]) >= 0
    for bad in ("a b", "x" * 129, "a;b"):
        made = call(app, "GET", "/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert made.startswith("req_")
    assert call(app, "GET", "/nope", headers={"x-request-id": "seen"}).headers["x-request-id"] == "seen"


def test_a_crash_of_ours_is_a_bare_500() -> None:
    manager = FakeManager([Script()])
    manager.refuse = lambda _req: 1 / 0  # type: ignore[assignment, return-value]
    response = post(build_app(manager, config()), "/v1/completions", {"prompt": "x"})
    body = error(response, 500, code="internal_error")
    assert "division" not in body["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/", "/chat/completions//"])
def test_paths_without_v1_and_with_a_slash_are_taken(path: str) -> None:
    app = build_app(FakeManager(), config())
    assert post(app, path, {"messages": [{"role": "user", "content": "x"}]}).status_code == 200
    assert call(app, "GET", "/models").json() == call(app, "GET", "/v1/models/").json()
    assert call(app, "GET", "/models/tiny").status_code == 200


def test_keys_that_come_twice_are_seen_whatever_the_strings_hold() -> None:
    rng = random.Random(7)
    pieces = ["a", ":", '"', "\\", '":', '\\"', " :", "\\\\", "{", '"a":1', "\u2028", "é"]
    for _ in range(2000):
        keys = ["".join(rng.choices(pieces, k=rng.randint(0, 4))) for _ in range(rng.randint(0, 4))]
        values = [rng.choice(["".join(rng.choices(pieces, k=rng.randint(0, 5))), [":"], [":", {":": ": "}], 5, None]) for _ in keys]
        members = [f"{json.dumps(k)}{rng.choice(['', ' ', chr(10)])}:{json.dumps(v)}" for k, v in zip(keys, values, strict=True)]
        raw = ("{" + ",".join(members) + "}").encode()
        if len(set(keys)) == len(keys):
            assert parse_object(raw) == dict(zip(keys, values, strict=True))
        else:
            with pytest.raises(InvalidValue, match="occurs twice"):
                parse_object(raw)


def test_a_large_bad_body_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(bodies.json, "loads", slow)
    filler = b'"x":"' + b"a" * bodies.MAX_EXPLAINED + b'"'
    for bad, words in ((b'{"a":1,"a":2,' + filler + b"}", "twice"), (b'{"a":NaN,' + filler + b"}", "not valid JSON")):
        with pytest.raises(InvalidValue, match=words):
            parse_object(bad)
    text = '":' * bodies.MAX_EXPLAINED
    assert parse_object(orjson.dumps({"prompt": text})) == {"prompt": text}


@pytest.mark.parametrize(("path", "name", "many"), [
    ("/v1/completions", "prompt", [5] * 300), ("/v1/completions", "prompt", [[1], [5] * 300]), ("/generate", "input_ids", [5] * 300),
])  # fmt: skip
def test_too_many_ids_are_refused_before_they_are_looked_at(path: str, name: str, many: list[Any]) -> None:
    refused = error(post(build_app(FakeManager(ctx_len=256), config()), path, {name: many}), 400, code="context_length_exceeded")
    assert (refused["n_prompt_tokens"], refused["n_ctx"]) == (300, 256)
    (many[-1] if isinstance(many[-1], list) else many).append("no id")
    error(post(build_app(FakeManager(ctx_len=256), config()), path, {name: many}), 400, code="context_length_exceeded")
