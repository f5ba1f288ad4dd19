"""The HTTP port, taken before anything slow happens, so that a busy port is known in milliseconds and not after the weights are read."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket

from rootlet.core.errors import BadConfig
from rootlet.core.log import logger

BACKLOG = 2048
MAX_FILES = 1 << 20

_log = logger("engine")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = any free one. TIME_WAIT of an earlier server is no hindrance. Raises `BadConfig`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise BadConfig(f"cannot listen on {host}:{port}: the host name {host!r} does not resolve ({error})") from error
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        # Two starters may both bind with SO_REUSEADDR; only one of them can listen. So listening is part of taking the port.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise BadConfig(f"cannot listen on {host}:{port}: {_reason(error, port)}") from error
    sock.setblocking(False)
    return sock


def _reason(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use by another process; choose another with --port (0 = any free one)"
    if error.errno == errno.EACCES:
        return f"no permission for port {port}; ports below 1024 need privileges, choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; check --host"
    return error.strerror or str(error)


def url_of(sock: socket.socket, host: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


def raise_file_limit() -> int:
    """Soft limit of open files up to the hard one (each connection is a file). Returns the limit now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if now < 4096:
        _log.warning("few_open_files_allowed", limit=now, advice="raise ulimit -n")
    return now
