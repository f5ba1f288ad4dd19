"""Large bodies: counted while they come, refused before anything is made of them, parsed beside the event loop."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest

from fixtures.asgi import Wire, call, error, post
from fixtures.fake_manager import FakeManager, config
from rootlet.core.errors import TooLarge
from rootlet.server import body as bodies
from rootlet.server import census as subject
from rootlet.server.app import build_app
from rootlet.server.census import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, Census

LIMITS = ("MAX_VALUES", "MAX_CONTAINERS", "MAX_STRINGS")


def counted(text: bytes) -> tuple[int, int, int]:
    """(commas, containers, quotes) outside strings, byte by byte: what the census has to find however the text comes in parts."""
    commas = containers = quotes = 0
    in_string = escaped = False
    for char in text.decode("latin1"):
        if escaped:
            escaped = False
        elif char == "\\" and in_string:
            escaped = True
        elif char == '"':
            quotes += 1
            in_string = not in_string
        elif not in_string:
            commas += char == ","
            containers += char in "[{"
    return commas, containers, quotes


def some_json(rng: random.Random) -> bytes:
    """Bytes whose strings are spelled as JSON spells them, cut off anywhere."""
    made = b""
    for _ in range(rng.randrange(12)):
        inside = b"".join(rng.choice([b"[", b",", b"a", rb"\\", rb"\"", rb"\n", b"{"]) for _ in range(rng.randrange(5)))
        made += rng.choice([b"[", b"]", b"{", b"}", b",", b":", b"1", b'"' + inside + b'"'])
    return made[: rng.randrange(len(made) + 1)]


def in_parts(text: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_the_census_counts_as_a_reader_of_single_bytes_does_however_the_parts_are_cut() -> None:
    rng = random.Random(7)
    seen = set()
    for _ in range(6000):
        text = some_json(rng)
        census = Census()
        for part in in_parts(text, rng):
            census.add(part)
        assert (census._num_commas, census._num_containers, census._num_quotes) == counted(text), text
        seen.add(counted(text))
    assert len(seen) > 50


def test_a_text_may_hold_what_it_likes() -> None:
    """Code as a prompt: brackets, commas and escaped quotes of a string are no values."""
    census = Census()
    for _ in range(9):
        census.add(b'"' + rb"[{\"a\": [1, 2]}, \\" * (MAX_CONTAINERS // 8) + b'"')


@pytest.mark.parametrize(("piece", "most"), [(b"5,", MAX_VALUES), (b"[]", MAX_CONTAINERS), (b"{}", MAX_CONTAINERS), (b'""', MAX_STRINGS)])
def test_each_limit_from_both_sides(piece: bytes, most: int) -> None:
    census = Census()
    for _ in range(64):
        census.add(piece * (most // 64))
    with pytest.raises(TooLarge, match=f"more than {most:,} "):
        census.add(piece)


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("MAX_VALUES", "[1,1,1,1,1]", "[1,1,1,1,1,1]"), ("MAX_CONTAINERS", "[[],[],{}]", "[[],[],{},[]]"),
    ("MAX_STRINGS", '["a","b"]', '["a","b","c"]'),
])  # fmt: skip
def test_a_body_beyond_a_limit_is_413_twice_and_nothing_is_parsed(name: str, good: str, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    plain = bodies.parse_object
    monkeypatch.setattr(bodies, "parse_object", lambda raw: parsed.append(raw) or plain(raw))
    for limit in LIMITS:
        monkeypatch.setattr(subject, limit, 5 if limit == name else 1000)
    app = build_app(FakeManager(), config())
    for _ in range(2):
        assert post(app, "/tokenize", b'{"text":"a","unknown":' + good.encode() + b"}").status_code == 200
        body = error(post(app, "/tokenize", b'{"text":"a","unknown":' + bad.encode() + b"}"), 413, code="request_too_large")
        assert "more than 5 " in body["message"]
    assert len(parsed) == 2


def test_a_body_beyond_a_limit_is_refused_before_the_rest_of_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MAX_CONTAINERS", 100)

    async def go() -> None:
        wire = Wire("/tokenize", {})
        asked = 0

        async def receive() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return {"type": "http.request", "body": b"[" * 60, "more_body": True}

        await build_app(FakeManager(), config())(wire.scope, receive, wire.send)
        assert asked == 2
        assert wire.sent[0]["status"] == 413

    asyncio.run(go())


@pytest.mark.parametrize("num_bytes", [bodies.INLINE_BYTES - 1, bodies.INLINE_BYTES, 3 * bodies.INLINE_BYTES])
def test_the_loop_turns_while_a_large_body_is_parsed(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parse ends only when somebody else's request was answered meanwhile: on the loop it never could."""
    plain, turned, threads = bodies.parse_object, threading.Event(), []

    def parse(raw: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread() is threading.main_thread())
        if len(raw) > bodies.INLINE_BYTES:
            assert turned.wait(60.0), "nobody else was served"
        return plain(raw)

    monkeypatch.setattr(bodies, "parse_object", parse)
    app = build_app(FakeManager(), config())
    raw = json.dumps({"text": "a", "unknown": ""}).encode()
    raw = raw.replace(b'""', b'"' + b"x" * (num_bytes - len(raw)) + b'"')
    assert len(raw) == num_bytes

    async def go() -> None:
        wire = Wire("/tokenize", {})
        bodies_left = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return bodies_left.pop()

        async def neighbour() -> None:
            while not threads:
                await asyncio.sleep(0)
            turned.set()

        await asyncio.gather(app(wire.scope, receive, wire.send), neighbour())
        assert wire.sent[0]["status"] == 200

    asyncio.run(go())
    assert threads == [num_bytes <= bodies.INLINE_BYTES]
    assert call(app, "GET", "/health").status_code == 200


def test_what_is_wrong_with_a_large_body_is_said_as_of_a_small_one() -> None:
    app = build_app(FakeManager(), config())
    filler = b"x" * bodies.INLINE_BYTES
    error(post(app, "/tokenize", b'{"text":5,"unknown":"' + filler + b'"}'), 400)
    error(post(app, "/tokenize", b'{"text":"a","unknown":"' + filler), 400)
    error(post(app, "/tokenize", b'{"text":"a","text":"' + filler + b'"}'), 400, param="text")
