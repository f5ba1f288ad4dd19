"""The OpenAPI document says what the parsers do: each bound of a field, and every field that docs/api.md has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.asgi import call, error, post
from fixtures.fake_manager import FakeManager, config
from rootlet.server.app import build_app

API = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text()
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
}
# Fields that another one must come with, so that their own value is looked at.
COMPANIONS: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}, "max_tokens": {"echo": True}}


def properties(path: str) -> dict[str, dict[str, Any]]:
    document = call(build_app(FakeManager(), config()), "GET", "/openapi.json").json()
    found: dict[str, dict[str, Any]] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    return found


def values(schema: dict[str, Any]) -> Iterator[tuple[float, bool]]:
    """(value, is it allowed?) at the bounds and just outside. The document writes every bound as a float."""
    kind, step = (int, 1) if "integer" in schema["type"] else (float, 0.001)
    if "minimum" in schema:
        yield from ((kind(schema["minimum"]), True), (kind(schema["minimum"]) - step, False))
    if "exclusiveMinimum" in schema:
        yield from ((schema["exclusiveMinimum"], False), (schema["exclusiveMinimum"] + step, True))
    if "maximum" in schema:
        yield from ((kind(schema["maximum"]), True), (kind(schema["maximum"]) + step, False))


@pytest.mark.parametrize("path", list(BODIES))
def test_each_bound_is_the_parsers(path: str) -> None:
    app = build_app(FakeManager(), config())
    bounded = {name: s for name, s in properties(path).items() if {"minimum", "exclusiveMinimum"} & s.keys()}
    assert len(bounded) > (2 if path == "/generate" else 15), "the document no longer has bounds"
    for name, schema in bounded.items():
        for value, allowed in values(schema):
            response = post(app, path, {**BODIES[path], **COMPANIONS.get(name, {}), name: value})
            if allowed:
                assert response.status_code == 200, (name, value, response.text)
            else:
                error(response, 400, param=name)


@pytest.mark.parametrize("path", list(BODIES))
def test_a_boolean_is_one(path: str) -> None:
    app = build_app(FakeManager(), config())
    flags = [name for name, s in properties(path).items() if "boolean" in str(s.get("type"))]
    assert len(flags) > 3, "the document no longer has flags"
    for name in flags:
        error(post(app, path, {**BODIES[path], name: "yes"}), 400, param=name)


@pytest.mark.parametrize("heading", ["Sampling parameters", "Fields of both OpenAI routes"])
def test_every_field_of_the_docs_is_in_the_document(heading: str) -> None:
    section = API.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[a-z_]+`[, ()]*)+)\|", section, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} - {"max_new_tokens"}  # /generate's word
    assert len(told) > 10, "the pattern no longer finds the fields"
    both = properties("/v1/chat/completions").keys() | properties("/v1/completions").keys()
    assert not told - both
