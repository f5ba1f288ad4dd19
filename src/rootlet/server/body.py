"""Reads a request's JSON body: media type, size limit, strict UTF-8, strict JSON, bounded nesting, no duplicate keys; always an object.

A large one is parsed in a thread: each call into C still holds up the event loop, but between them it turns, and how long one can take is bounded
by what the census (census.py) lets through.

A body is JSON in UTF-8 and says so (`application/json`, `application/*+json`, or no content type at all): other media types are refused, which
also keeps foreign web pages from posting to a local server, since browsers send those without asking first. They send a body without a type
unasked too, so a sender with an `Origin` must name it.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import orjson
from starlette.requests import Request

from rootlet.core.errors import InvalidValue, TooLarge
from rootlet.server.census import Census
from rootlet.server.errors import HttpError

MAX_DEPTH = 128
INLINE_BYTES = 2**18  # bodies up to here are parsed on the event loop (about a millisecond); larger ones in a thread
MAX_EXPLAINED = 2**20  # bytes of a bad body that are read again to say which field it was
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii"}


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


def check_media_type(request: Request) -> None:
    """Raises `HttpError` 415 for a body that is not plain UTF-8 JSON."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(415, f"Content-Encoding {encoding[:40]!r} is not supported; send the JSON uncompressed")
    kind, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(415, f"Content-Type {kind[:60]!r} is not supported; send application/json")
    if not kind and "origin" in request.headers:
        raise HttpError(415, "a web page must name its Content-Type; send application/json")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip('" ') not in _CHARSETS:
            raise HttpError(415, f"charset {value[:40]!r} is not supported; JSON is UTF-8")


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """The whole body. Raises `TooLarge` as soon as more than `max_bytes` are announced or arrive, or more values than the census allows;
    `ClientGone` if the sender leaves."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    census = Census()
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        census.add(part)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {max_bytes / 2**20:g} MiB (limit: --max-body-mib)")


async def read_json(request: Request, *, max_bytes: int, optional: bool = False) -> dict[str, Any]:
    """The body as an object; an `optional` one may be empty. Raises `InvalidValue` (400), `HttpError` (415), `TooLarge` (413), `ClientGone`."""
    check_media_type(request)
    raw = await read_bytes(request, max_bytes=max_bytes)
    if optional and not raw.strip():
        return {}
    return parse_object(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(parse_object, raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Strict JSON object from bytes. Raises `InvalidValue` with the position, or with the path of a NaN or an infinity."""
    if not raw.strip():
        raise InvalidValue(None, "the request body is empty; send a JSON object")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _explain(raw, error) from None
    if not isinstance(value, dict):
        raise InvalidValue(None, f"the request body must be a JSON object, got {_json_type(value)}")
    num_keys = _count_keys(value)
    if raw.count(b":") != num_keys and _num_sent_keys(raw) != num_keys:  # no colon too many: every key is there once
        _refuse_duplicates(raw)
    return value


def _num_sent_keys(raw: bytes) -> int:
    """Keys in the text of a valid JSON document, twice where they come twice: strings that a colon follows."""
    parts = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # without escapes: every second part is the inside of a string
    return sum(part.lstrip()[:1] == b":" for part in parts[2::2])


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _count_keys(root: dict[str, Any]) -> int:
    """Keys of all objects. Raises `InvalidValue` beyond `MAX_DEPTH` levels. Lists of plain values cost one pass in C."""
    count = 0
    level: list[Any] = [root]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidValue(None, f"the request body is nested deeper than {MAX_DEPTH} levels")
        deeper: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                count += len(node)
                values: Any = node.values()
            else:
                values = node
            if not {dict, list}.isdisjoint(set(map(type, values))):
                deeper.extend(v for v in values if isinstance(v, dict | list))
        level = deeper
    return count


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidValue(key[:100], f"the key {key[:100]!r} occurs twice in one object of the request body")
            seen.add(key)
    return result


def _refuse_duplicates(raw: bytes) -> None:
    """Raises `InvalidValue` with the name of the key, unless that would hold up everybody else for seconds."""
    if len(raw) <= MAX_EXPLAINED:
        json.loads(raw, object_pairs_hook=_pairs)
    raise InvalidValue(None, "a key occurs twice in one object of the request body")


def _explain(raw: bytes, error: orjson.JSONDecodeError) -> InvalidValue:
    """Names the field of a NaN or infinity, which strict JSON has no word for; otherwise the parser's own message."""
    try:
        value = json.loads(raw.decode("utf-8")) if len(raw) <= MAX_EXPLAINED else None
    except (ValueError, RecursionError):
        value = None
    path = _non_finite(value, "", 0)
    if path is not None:
        return InvalidValue(path or None, f"{path or 'the body'} must be a finite number; NaN, Infinity and numbers beyond 1e308 are not JSON")
    return InvalidValue(None, f"the request body is not valid JSON in UTF-8: {str(error)[:200]}")


def _non_finite(value: object, path: str, depth: int) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return path
    if depth > MAX_DEPTH:
        return None
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, float | dict | list):
            step = f"[{key}]" if isinstance(key, int) else f".{str(key)[:60]}" if path else str(key)[:60]
            found = _non_finite(item, path + step, depth + 1)
            if found is not None:
                return found
    return None
