"""Keeps other people's web pages away from a server on this machine: a browser lets every page it shows send requests to 127.0.0.1.

Two doors, two rules. A page cannot read a reply (no CORS) nor send JSON (that asks first, and is refused), but a bare GET or POST needs neither:
so the routes that change the engine are closed to what a browser marks as coming from elsewhere. And a page whose own name was made to point here
(DNS rebinding) is of the same origin for the browser: so a server on a loopback address answers to loopback names only. Programs send no such marks
and meet neither rule. Does not know keys (`auth.py`), nor media types (`body.py`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.types import Scope

from rootlet.server.errors import HttpError, show

# What changes the engine for everybody. Generation is not among them: it needs a JSON body, which no page sends unasked.
GUARDED = frozenset({"/flush_cache", "/abort_request", "/pause_generation", "/continue_generation", "/cache/pin", "/cache/unpin"})


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key == name]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def host_name(host: str) -> str:
    """The name or address in a Host header, in lower case, without port, brackets and the root's dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower().removesuffix(".")


def is_local(scope: Scope, bound: str) -> bool:
    """Whether the server listens on a loopback address only. `bound` = --host, maybe a name; the connection knows what it became."""
    wanted = _address(bound)
    reached = _address((scope.get("server") or ("", None))[0])
    return not (wanted is not None and wanted.is_unspecified) and reached is not None and reached.is_loopback


def check_host(scope: Scope, *, bound: str) -> None:
    """Raises `HttpError` 403 when a server on a loopback address is asked under a name that could be anybody's. No Host (HTTP/1.0), an
    empty one and plain addresses are fine: browsers always send one, and no page can make an address point elsewhere."""
    if not is_local(scope, bound):
        return
    for host in _values(scope["headers"], b"host"):
        name = host_name(host)
        if _address(name) is None and name not in ("", "localhost", bound.lower()) and not name.endswith(".localhost"):
            advice = "use localhost, have a proxy send that as Host, or start the server with an --api-key, which lifts this rule"
            raise HttpError(403, f"this server listens on {bound} only and does not answer to the name {show(name)}: {advice}", code="foreign_host")


def check_page(scope: Scope) -> None:
    """Raises `HttpError` 403 when a web page of another origin asks for a guarded route. `scope["path"]` is the normalised one."""
    if scope["path"] in GUARDED and _is_foreign(scope):
        raise HttpError(403, f"{scope['path']} changes the engine and is closed to web pages of other origins", code="cross_site")


def _is_foreign(scope: Scope) -> bool:
    """Browsers say where a request comes from in Sec-Fetch-Site (if this is https, or localhost) and in Origin (if it is no GET). A GET under a plain
    address of the network has neither; what calls itself a browser there has to POST."""
    headers = scope["headers"]
    site = _values(headers, b"sec-fetch-site")
    if "same-origin" in site:
        return len(site) > 1
    if site not in ([], ["none"]):
        return True
    origins = _values(headers, b"origin")
    if origins:
        own = [host.lower() for host in _values(headers, b"host")]
        return any(origin.lower().partition("://")[2] not in own for origin in origins)
    return not site and scope["method"] == "GET" and any(agent.startswith("Mozilla/") for agent in _values(headers, b"user-agent"))
