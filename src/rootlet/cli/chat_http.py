"""Answers of a running server for `rootlet chat --url`: any server with OpenAI's chat route. The standard library is enough for that."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from rootlet.core.errors import InvalidValue, Unavailable

Messages = list[dict[str, Any]]
_ROUTE = "/chat/completions"
_SHOWN_CHARS = 200


def base_of(url: str) -> str:
    """The root of a server: `url` with or without scheme, with or without /v1 or the whole route. Raises `InvalidValue`, for a bare port too."""
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.hostname.isdecimal():
        raise InvalidValue("url", f"--url {url}: expected something like 127.0.0.1:30000 or https://host/v1")
    return full.rstrip("/").removesuffix(_ROUTE).removesuffix("/v1")


def chat_route(url: str) -> str:
    """Where to post a chat; `url` and errors as for `base_of`."""
    return f"{base_of(url)}/v1{_ROUTE}"


def answers_of(url: str, key: str | None, request: dict[str, Any]) -> Callable[[Messages], Generator[str, None, None]]:
    """A function from messages to the texts of a streamed answer. `request` holds the other fields of the body. Raises `InvalidValue`."""
    route = chat_route(url)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def answer(messages: Messages) -> Generator[str, None, None]:
        body = json.dumps({"messages": messages, "stream": True, **request}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(route, body, headers)) as reply:
                yield from _deltas(reply, route)
        except urllib.error.HTTPError as error:
            raise Unavailable(_said(error, route)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"no answer from {route}: {error or type(error).__name__} (start a server with `rootlet serve`)") from None

    return answer


def _said(error: urllib.error.HTTPError, route: str) -> str:
    """The server's own message, else its status and the beginning of whatever it sent."""
    text = error.read().decode("utf-8", "replace").strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    shown = " ".join(text.split())[:_SHOWN_CHARS]
    return f"{route} answered {error.code} {error.reason}" + (f": {shown}" if shown else "") + "; is it a server with OpenAI's routes?"


def _deltas(lines: Any, route: str) -> Iterator[str]:
    for line in lines:
        data = line.decode("utf-8", "replace").removeprefix("data:").strip()
        if not data or data == "[DONE]" or data.startswith((":", "event:", "id:", "retry:")):
            continue
        try:
            event = json.loads(data)
            if "error" in event:
                raise Unavailable(event["error"]["message"])
            texts = [choice["delta"].get("content") or "" for choice in event["choices"]]
        except (ValueError, KeyError, TypeError):
            raise Unavailable(f"{route} did not answer as a chat server does: {data[:_SHOWN_CHARS]}") from None
        yield from texts
