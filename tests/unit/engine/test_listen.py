"""The port is taken at once or refused with words that help."""

from __future__ import annotations

import resource
import socket

import pytest

from fixtures.ports import port_of, reserved_port
from rootlet.core.errors import BadConfig
from rootlet.engine.listen import listen, raise_file_limit, url_of


def test_port_zero_picks_a_free_one_and_says_which() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        assert url_of(sock, "127.0.0.1") == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port), 60.0):
            pass


def test_row_88_a_busy_port_is_refused_with_its_name() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(BadConfig, match=rf"127\.0\.0\.1:{port}.*in use.*--port"):
            listen("127.0.0.1", port)


def test_row_88_time_wait_is_no_hindrance() -> None:
    with reserved_port() as ours:
        sock = listen("127.0.0.1", port_of(ours))
        client = socket.create_connection(("127.0.0.1", port_of(ours)), 60.0)
        sock.setblocking(True)
        served, _ = sock.accept()
        served.close()  # the server closes first: its side goes to TIME_WAIT
        client.close()
        sock.close()
        listen("127.0.0.1", port_of(ours)).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 300, ""])
def test_row_88_a_foreign_host_is_refused(host: str) -> None:
    with pytest.raises(BadConfig, match="cannot listen on"):
        listen(host, 0)


def test_row_39_the_soft_file_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        assert raise_file_limit() >= min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else raise_file_limit() >= 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
