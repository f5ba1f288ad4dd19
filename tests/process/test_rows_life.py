"""Rows LIFE of the fault table (86, 87, 88, 89) with a real model: `test_lifecycle.py` has the same with a fake one, and finer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fixtures.granted import Granted, until
from fixtures.live_server import Live, held, live, prompt, tiny_flags, tiny_llama
from fixtures.ports import port_of, reserved_port
from fixtures.wire import HealthProbe, connect, post, request_bytes, strict_json
from rootlet.bench.server_process import ServerProcess, running_server

pytestmark = pytest.mark.process

PLAIN = "/v1/completions"
CTX = 4096
LONG = 30_000  # more tokens than any machine makes before we get round to the kill
Result = tuple[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("life"), max_position_embeddings=32_768)


@pytest.fixture
def server(model: Path) -> Iterator[ServerProcess]:
    flags = (*tiny_flags(ctx=32_768, pool=130_000, running=4), "--detokenizer", "process", "--drain-timeout", "120")
    flags = tuple("info" if flag == "warning" else flag for flag in flags)
    with running_server(str(model), *flags, env={**os.environ, "OMP_NUM_THREADS": "1"}) as made:
        yield made


def _read(base: str, max_tokens: int, *, streamed: bool = True) -> Result:
    """(status, events or the reply) of one request that wants `max_tokens`."""
    body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": streamed}
    response = post(base, PLAIN, body)
    if response.headers["content-type"].startswith("application/json"):
        return response.status_code, [strict_json(response.content)]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return response.status_code, [strict_json(line.encode()) for line in lines]


def _open(pool: ThreadPoolExecutor, server: ServerProcess, lengths: list[int], **how: bool) -> list[Future[Result]]:
    return [pool.submit(_read, server.base, length, **how) for length in lengths]


def _run(pool: ThreadPoolExecutor, server: ServerProcess, num: int) -> list[Future[Result]]:
    """Streams under way and two more that are not streamed, so long that none ends by itself; four run, the others wait."""
    with held(server) as inside:
        found = _open(pool, server, [LONG] * num) + _open(pool, server, [LONG] * 2, streamed=False)
        inside(num + 2)
    live_server = Live(server)
    until(lambda: live_server.metrics()["rootlet_running_requests"] == min(4, num + 2), "running requests", 20.0)
    return found


def _pid(server: ServerProcess, role: str) -> int:
    found = re.search(rf"started role={role} pid=(\d+)", server.log.read_text())
    assert found is not None
    return int(found[1])


def test_row_86_a_drain_finishes_what_runs_and_refuses_what_comes(server: ServerProcess) -> None:
    """All of it while nothing is launched: what is inside cannot be over before the new request comes."""
    with ThreadPoolExecutor(16) as pool:
        with held(server) as inside:
            streams = _open(pool, server, [3000, *[1500] * 7, *[20] * 4])  # four will run, eight wait
            inside(12)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "draining 12 requests" in server.log.read_text(), "draining", 5.0)
            refused = httpx.post(server.base + PLAIN, json={"prompt": "a"}, timeout=60.0, verify=False)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx.get(server.base + "/ready", timeout=60.0, verify=False).status_code == 503
            assert httpx.get(server.base + "/health", timeout=60.0, verify=False).status_code == 200
        for future in streams:
            status, events = future.result()
            assert status == 200
            assert [c["finish_reason"] for e in events if "choices" in e for c in e["choices"] if c["finish_reason"]] == ["length"]
    assert server.process.wait(60.0) == 0


def test_row_86_what_does_not_end_in_the_time_of_a_drain_is_told_so(model: Path) -> None:
    flags = (*tiny_flags(ctx=32_768, pool=130_000, running=4), "--drain-timeout", "1")
    with running_server(str(model), *flags, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server, ThreadPoolExecutor(8) as pool:
        streams = _run(pool, server, 4)
        server.process.send_signal(signal.SIGTERM)
        for future in streams:
            assert future.result()[1][-1]["error"]["code"] == "shutting_down"
        assert server.process.wait(60.0) == 0


@pytest.mark.parametrize(("role", "number"), [("scheduler", signal.SIGKILL), ("scheduler", signal.SIGSEGV), ("detokenizer", signal.SIGKILL)])
def test_row_87_a_dead_worker_is_told_to_everyone(server: ServerProcess, role: str, number: signal.Signals) -> None:
    with ThreadPoolExecutor(8) as pool:
        streams = _run(pool, server, 4)
        pid = _pid(server, role)
        with Granted() as clock:
            os.kill(pid, number)
            for future in streams:
                assert future.result()[1][-1]["error"]["code"] == "engine_dead"
            assert clock.now_s() < 5.0
            assert server.process.wait(60.0) == 1
            assert clock.now_s() < 10.0
    assert number.name in server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_row_87_a_stopped_worker_is_found_in_the_documented_time(server: ServerProcess, role: str) -> None:
    """20 s without a sign of life."""
    with ThreadPoolExecutor(4) as pool:
        streams = _run(pool, server, 2)
        pid = _pid(server, role)
        with Granted() as clock:
            os.kill(pid, signal.SIGSTOP)
            for future in streams:
                assert future.result()[1][-1]["error"]["code"] == "engine_dead"
            assert server.process.wait(60.0) == 1
            assert clock.now_s() < 40.0


def _start(model: Path, *flags: str) -> tuple[int, str, float]:
    """(exit code, output, seconds granted) of a start that must fail."""
    command = [sys.executable, "-m", "rootlet.cli.main", "serve", str(model), *flags]
    with Granted() as clock:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stdout + done.stderr, clock.now_s()


def test_row_88_what_cannot_be_listened_on_fails_before_loading(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        starts = {f"127.0.0.1:{port}": _start(model, "--port", str(port))}
    starts["70000"] = _start(model, "--port", "70000")
    starts["203.0.113.7"] = _start(model, "--host", "203.0.113.7", "--port", "0")
    unknown = "no.such.host.invalid"
    starts[unknown] = _start(model, "--host", unknown, "--port", "0")
    for words, (code, output, seconds) in starts.items():
        assert code not in (0, None)
        assert words in output
        assert "Traceback" not in output
        assert "started role" not in output
        assert seconds < 15.0 or words == unknown  # 5 s on an idle machine; how long a name server is waited for is not ours


def test_row_88_a_server_does_not_share_its_port_and_leaves_it_clean(model: Path) -> None:
    with reserved_port() as ours:
        port = port_of(ours)
        with running_server(str(model), *tiny_flags(), port=port) as server:
            code, output, _ = _start(model, "--port", str(port))
            assert code == 2
            assert f"127.0.0.1:{port}" in output
            assert httpx.get(server.base + "/health", timeout=60.0, verify=False).status_code == 200
            with connect(server.base) as raw:  # leaves a connection in TIME_WAIT on the server's side
                raw.sendall(request_bytes("/health", method="GET", headers=("Connection: close",)))
                while raw.recv(65536):
                    pass
            assert server.stop() == 0
        with running_server(str(model), *tiny_flags(), port=port) as again:
            assert again.base == server.base
        ours.listen()  # would fail beside anybody else who listens there


@pytest.fixture(scope="module")
def busy(model: Path) -> Iterator[Live]:
    with live(model, *tiny_flags(ctx=CTX, pool=8192, running=4), check=False) as made:
        yield made


def _busy(server: Live, *, prompts: int, for_s: float) -> None:
    base = server.server.base
    slow_generate: list[float] = []
    with HealthProbe(base) as probe, ThreadPoolExecutor(prompts) as pool, Granted() as clock:
        with held(server.server) as inside:
            jobs = [pool.submit(post, base, PLAIN, {"prompt": prompt(CTX - 10, k), "max_tokens": 5, "ignore_eos": True}) for k in range(prompts)]
            inside(prompts)
        with httpx.Client(base_url=base, timeout=60.0, verify=False) as client:
            while not slow_generate or (not all(job.done() for job in jobs) and clock.now_s() < for_s):
                begun_s = clock.now_s()
                assert client.get("/health_generate").status_code == 200
                slow_generate.append(clock.now_s() - begun_s)
                threading.Event().wait(0.2)
        assert all(job.result().status_code == 200 for job in jobs)
    assert probe.worst_s < 1.0  # 0.2 s promised; the test machine is shared
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
            return httpx.get(server.base + "/health_generate", timeout=60.0, verify=False).status_code == 503
        except httpx.HTTPError:
            return not psutil.pid_exists(server.process.pid) or server.process.poll() is not None

    until(unhealthy, "503", 60.0)
