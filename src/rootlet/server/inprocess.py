"""Calls the ASGI app without a socket: `rootlet batch` answers a line exactly as a server would. Does not stream."""

from __future__ import annotations

from asyncio import Event
from typing import Any

import orjson


async def post_json(app: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """POST `body` to `path`; returns (status, decoded reply). The app sees one complete request and no disconnect."""
    payload = orjson.dumps(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    sent = iter([{"type": "http.request", "body": payload, "more_body": False}])
    status, parts = 500, list[bytes]()

    async def receive() -> dict[str, Any]:
        message = next(sent, None)
        if message is None:
            # The caller waits for the whole reply, so it never disconnects: this await ends with the request's task.
            await _forever()
        return message or {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, orjson.loads(b"".join(parts))


async def _forever() -> None:
    await Event().wait()
