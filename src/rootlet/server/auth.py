"""One key for every route but liveness, readiness and HEAD /: what is not on the short list below needs it.

The key is compared in constant time and never logged or echoed.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from rootlet.server.errors import HttpError

OPEN_PATHS = frozenset({"/health", "/ready"})


def is_open(method: str, path: str) -> bool:
    """Whether a route answers without a key. `path` is the normalised one that the router sees."""
    return path in OPEN_PATHS or (method == "HEAD" and path == "/")


def presented_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """What the client offers: `Authorization: Bearer`, `x-api-key`, `api-key`."""
    keys = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(token.strip())
        elif name in (b"x-api-key", b"api-key"):
            keys.append(value.strip())
    return keys


def check_key(api_key: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises `HttpError` 401. Every offered key is compared, so that the time tells nothing."""
    wanted = api_key.encode("utf-8")
    matches = [hmac.compare_digest(wanted, key) for key in presented_keys(headers)]
    if any(matches):
        return
    message = "the API key is wrong" if matches else "an API key is required: send it as 'Authorization: Bearer KEY'"
    raise HttpError(401, message, headers={"www-authenticate": "Bearer"})
