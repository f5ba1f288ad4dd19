"""Rows LIFE of the fault table (86, 87, 88, 89) with a real model: `test_lifecycle.py` has the same with a fake one, and finer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fixtures.live_server import Live, live, prompt, tiny_flags, tiny_llama, until
from fixtures.wire import HealthProbe, connect, post, request_bytes, strict_json
from rootlet.bench.server_process import ServerProcess, free_port, running_server

pytestmark = pytest.mark.process

PLAIN = "/v1/completions"
CTX = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("life"))


@pytest.fixture
def server(model: Path) -> Iterator[ServerProcess]:
    flags = (*tiny_flags(ctx=CTX, pool=32_000, running=4), "--detokenizer", "process", "--drain-timeout", "20")
    flags = tuple("info" if flag == "warning" else flag for flag in flags)
    with running_server(str(model), *flags, env={**os.environ, "OMP_NUM_THREADS": "1"}) as made:
        yield made


def _read(base: str, max_tokens: int, *, streamed: bool = True) -> tuple[int, list[dict[str, Any]], float]:
    """(status, events or the reply, when the connection was done) of one request that wants `max_tokens`."""
    body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": streamed}
    response = post(base, PLAIN, body)
    if response.headers["content-type"].startswith("application/json"):
        return response.status_code, [strict_json(response.content)], time.monotonic()
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return response.status_code, [strict_json(line.encode()) for line in lines], time.monotonic()


def _open(pool: ThreadPoolExecutor, server: ServerProcess, lengths: list[int], **how: bool) -> list[Future[tuple[int, list[dict[str, Any]], float]]]:
    """Requests under way: all of them have reached the engine."""
    found = [pool.submit(_read, server.base, length, **how) for length in lengths]
    until(lambda: server.state()["num_open_requests"] == len(lengths), "open requests", 20.0)
    return found


def _pid(server: ServerProcess, role: str) -> int:
    found = re.search(rf"started role={role} pid=(\d+)", server.log.read_text())
    assert found is not None
    return int(found[1])


def test_row_86_a_drain_finishes_what_runs_and_refuses_what_comes(server: ServerProcess) -> None:
    with ThreadPoolExecutor(16) as pool:
        streams = _open(pool, server, [3000, *[1500] * 7, *[20] * 4])  # four run, eight wait
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in server.log.read_text(), "draining", 5.0)
        refused = httpx.post(server.base + PLAIN, json={"prompt": "a"}, verify=False)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(server.base + "/ready", verify=False).status_code == 503
        assert httpx.get(server.base + "/health", verify=False).status_code == 200
        for future in streams:
            status, events, _ = future.result()
            last = [c["finish_reason"] for e in events if "choices" in e for c in e["choices"] if c["finish_reason"]]
            assert status in (200, 503)
            assert last == ["length"] or "error" in events[-1]
    assert server.process.wait(30.0) == 0


@pytest.mark.parametrize(("role", "number"), [("scheduler", signal.SIGKILL), ("scheduler", signal.SIGSEGV), ("detokenizer", signal.SIGKILL)])
def test_row_87_a_dead_worker_is_told_to_everyone(server: ServerProcess, role: str, number: signal.Signals) -> None:
    with ThreadPoolExecutor(8) as pool:
        streams = _open(pool, server, [3900] * 4) + _open_more(pool, server)
        os.kill(_pid(server, role), number)
        begun_s = time.monotonic()
        for future in streams:
            _, events, ended_s = future.result(timeout=20.0)
            assert events[-1]["error"]["code"] == "engine_dead"
            assert ended_s - begun_s < 5.0
        assert server.process.wait(10.0) == 1
        assert time.monotonic() - begun_s < 10.0
    assert number.name in server.log.read_text()


def _open_more(pool: ThreadPoolExecutor, server: ServerProcess) -> list[Future[tuple[int, list[dict[str, Any]], float]]]:
    found = [pool.submit(_read, server.base, 3900, streamed=False) for _ in range(2)]
    until(lambda: server.state()["num_open_requests"] == 6, "open requests", 20.0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_row_87_a_stopped_worker_is_found_in_the_documented_time(server: ServerProcess, role: str) -> None:
    """20 s without a sign of life."""
    with ThreadPoolExecutor(4) as pool:
        streams = _open(pool, server, [3900] * 2)
        os.kill(_pid(server, role), signal.SIGSTOP)
        begun_s = time.monotonic()
        for future in streams:
            assert future.result(timeout=60.0)[1][-1]["error"]["code"] == "engine_dead"
        assert server.process.wait(60.0) == 1
        assert time.monotonic() - begun_s < 40.0


def _start(model: Path, *flags: str) -> tuple[int, str, float]:
    """(exit code, output, seconds) of a start that must fail."""
    command = [sys.executable, "-m", "rootlet.cli.main", "serve", str(model), *flags]
    begun_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begun_s


def test_row_88_what_cannot_be_listened_on_fails_before_loading(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        starts = {f"127.0.0.1:{port}": _start(model, "--port", str(port))}
    starts["70000"] = _start(model, "--port", "70000")
    starts["203.0.113.7"] = _start(model, "--host", "203.0.113.7", "--port", str(free_port()))
    starts["no.such.host.invalid"] = _start(model, "--host", "no.such.host.invalid", "--port", str(free_port()))
    for words, (code, output, seconds) in starts.items():
        assert code not in (0, None)
        assert words in output
        assert "Traceback" not in output
        assert "started role" not in output
        assert seconds < 15.0  # 5 s on an idle machine


def test_row_88_a_server_does_not_share_its_port_and_leaves_it_clean(server: ServerProcess, model: Path) -> None:
    port = server.base.rsplit(":", 1)[1]
    code, output, _ = _start(model, "--port", port)
    assert code == 2
    assert f"127.0.0.1:{port}" in output
    assert httpx.get(server.base + "/health", verify=False).status_code == 200
    with connect(server.base) as raw:  # leaves a connection in TIME_WAIT on the server's side
        raw.sendall(request_bytes("/health", method="GET", headers=("Connection: close",)))
        while raw.recv(65536):
            pass
    assert server.stop() == 0
    with running_server(str(model), *tiny_flags()) as again:  # port of its own; the old one is free again
        assert again.base != server.base
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", int(port)))


@pytest.fixture(scope="module")
def busy(model: Path) -> Iterator[Live]:
    with live(model, *tiny_flags(ctx=CTX, pool=8192, running=4), check=False) as made:
        yield made


def _busy(server: Live, *, prompts: int, for_s: float) -> None:
    base = server.server.base
    slow_generate: list[float] = []
    with HealthProbe(base) as probe, ThreadPoolExecutor(prompts) as pool:
        until_s = time.monotonic() + for_s
        jobs = [pool.submit(post, base, PLAIN, {"prompt": prompt(CTX - 10, k), "max_tokens": 5, "ignore_eos": True}) for k in range(prompts)]
        with httpx.Client(base_url=base, timeout=10.0, verify=False) as client:
            while not all(job.done() for job in jobs) and time.monotonic() < until_s:
                begun_s = time.monotonic()
                assert client.get("/health_generate").status_code == 200
                slow_generate.append(time.monotonic() - begun_s)
                threading.Event().wait(0.2)
        assert all(job.result().status_code == 200 for job in jobs)
    assert probe.worst_s < 1.0  # 0.2 s promised; the test machine is shared
    assert slow_generate
    assert max(slow_generate) < 5.0
    server.assert_live()  # no probe left a request behind


def test_row_89_health_is_quick_while_prefills_fill_everything(busy: Live) -> None:
    _busy(busy, prompts=20, for_s=60.0)


@pytest.mark.slow
def test_row_89_at_full_size(busy: Live) -> None:
    _busy(busy, prompts=100, for_s=120.0)


@pytest.mark.slow
def test_row_89_a_stopped_scheduler_is_unhealthy(server: ServerProcess) -> None:
    os.kill(_pid(server, "scheduler"), signal.SIGSTOP)

    def unhealthy() -> bool:
        try:
            return httpx.get(server.base + "/health_generate", timeout=30.0, verify=False).status_code == 503
        except httpx.HTTPError:
            return not psutil.pid_exists(server.process.pid) or server.process.poll() is not None

    until(unhealthy, "503", 60.0)
