"""Keys for every route but liveness, readiness and HEAD /: what is not on the short list below needs one.

Keys are compared in constant time and never logged or echoed. With several keys, whose key it was is the request's tenant, named by a short hash.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

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


def tenant_of_key(key: str) -> str:
    """The name of a key in logs and timelines: the beginning of its sha256."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:8]


class Keys:
    """The keys of one server; none = no key is asked for."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(key.encode(), tenant_of_key(key)) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Whose request it is, None where all share one key. Raises `HttpError` 401. Every key is compared with every offered one, so that the
        time tells nothing."""
        offered = presented_keys(headers)
        matches = [name for key, name in self._keys for given in offered if hmac.compare_digest(key, given)]
        if matches:
            return matches[0] if len(self._keys) > 1 else None
        message = "the API key is wrong" if offered else "an API key is required: send it as 'Authorization: Bearer KEY'"
        raise HttpError(401, message, headers={"www-authenticate": "Bearer"})
