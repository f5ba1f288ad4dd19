"""A real server, real processes, real signals; only the model is fake (HashLM). Waits on conditions with deadlines, never on time.

Rows LIFE and CONN of the fault table: who dies, who notices, what a client sees, what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fixtures.granted import Granted, until
from fixtures.live_server import held
from rootlet.bench.server_process import ServerProcess

pytestmark = pytest.mark.process

DEADLINE_S = 120.0  # so that nothing hangs; no promise
ENDLESS = 50_000  # tokens, at 2 ms a step
RUN = (
    "import json, sys\n"
    "from rootlet.config.load import load_config\n"
    "from rootlet.engine.launch import launch\n"
    "options = json.loads(sys.argv[1])\n"
    "stuck = options.pop('stuck_after_s', 20.0)\n"
    "sys.exit(launch(load_config(options, {}, None)[0], stuck_after_s=stuck))\n"
)


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    folder: Path
    lines: list[str] = field(default_factory=list)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        return re.search(r"http://\S+", self.output)[0]  # type: ignore[index]

    def pid(self, role: str) -> int:
        found = until(lambda: re.search(rf"started role={role} pid=(\d+)", self.output), f"start of the {role}", DEADLINE_S)
        assert found is not None
        return int(found[1])

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def says(self, words: str) -> None:
        """What a process said is read by a thread, so maybe a moment after the process is gone."""
        until(lambda: words in self.output, lambda: f"{words!r} in {self.output}", DEADLINE_S)

    @property
    def asked(self) -> ServerProcess:
        return ServerProcess(self.url, self.process, self.folder)

    def inside(self, count: int) -> None:
        """Waits until so many requests are inside; they must be such as do not end meanwhile."""
        until(lambda: self.asked.state()["num_open_requests"] == count, f"{count} requests inside", DEADLINE_S)

    def leftovers(self) -> list[Path]:
        return list(self.folder.glob("rootlet-*"))


@contextlib.contextmanager
def server(folder: Path, *, step_ms: int = 2, ready: bool = True, **options: Any) -> Iterator[Server]:
    """A server on a free port; killed with its children whatever the test does."""
    flags = {"port": 0, "ctx_len": 100_000, "max_total_tokens": 400_000, "log_level": "info", **options}
    environment = {**os.environ, "ROOTLET_TEST_EXECUTOR": f"hash_lm:{step_ms}", "ROOTLET_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", RUN, json.dumps(flags)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    made = Server(process, folder)
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: made.lines.extend(line.decode() for line in process.stdout or ()), daemon=True)
    reader.start()
    try:
        if ready:
            until(lambda: "ready on" in made.output or process.poll() is not None, "ready", DEADLINE_S)
            assert process.poll() is None, made.output
        yield made
    finally:
        children = [int(pid) for pid in re.findall(r"started role=\w+ pid=(\d+)", made.output)]
        if process.poll() is None:
            process.kill()
        process.wait()
        for pid in children:
            until(lambda pid=pid: gone(pid), f"end of child {pid}", 5.0)  # type: ignore[misc]
        reader.join(5.0)
        process.stdout.close()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Client(threading.Thread):
    """One request in a thread: `events` as they come, `status`, `error` if the connection broke."""

    def __init__(self, url: str, *, max_tokens: int, stream: bool = True, n: int = 1) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.status = 0
        self.body = ""
        self.error: Exception | None = None
        self._url = url
        self._json = {"prompt": "hello", "max_tokens": max_tokens, "stream": stream, "n": n, "ignore_eos": True}
        self.start()

    def run(self) -> None:
        try:
            where = f"{self._url}/v1/completions"
            with httpx.Client(timeout=240.0) as client, client.stream("POST", where, json=self._json) as reply:
                self.status = reply.status_code
                for line in reply.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                    self.body += line
        except httpx.HTTPError as error:
            self.error = error

    def reading(self) -> Client:
        until(lambda: len(self.events) > 2, "the first events", DEADLINE_S)
        return self

    def done(self) -> Client:
        self.join(DEADLINE_S)
        assert not self.is_alive(), f"the client still waits after {DEADLINE_S} s"
        return self

    @property
    def codes(self) -> list[str]:
        """Error codes in the stream or the body."""
        return re.findall(r'"code":\s*"(\w+)"', self.body)

    @property
    def finishes(self) -> list[str]:
        return re.findall(r'"finish_reason":\s*"(\w+)"', self.body)


def health(url: str) -> int:
    return httpx.get(f"{url}/health", timeout=60.0).status_code


@pytest.mark.parametrize("detokenizer", ["inline", "process"])
def test_row_86_sigterm_drains_and_refuses(tmp_path: Path, detokenizer: str) -> None:
    with server(tmp_path, detokenizer=detokenizer, drain_timeout=120) as s:
        running = Client(s.url, max_tokens=1500).reading()
        with held(s.asked):  # or it would be over before a slow client comes to be refused
            s.process.send_signal(signal.SIGTERM)
            s.says("draining 1 request")
            refused = Client(s.url, max_tokens=4, stream=False).done()
            assert (refused.status, refused.codes) == (503, ["shutting_down"])
            assert httpx.get(f"{s.url}/ready", timeout=60.0).status_code == 503
            assert health(s.url) == 200
        running.done()
        assert (running.error, running.finishes, running.events[-1]) == (None, ["length"], "[DONE]")
        assert s.wait() == 0
        assert s.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_row_86_a_second_signal_aborts_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with server(tmp_path) as s:
        running = Client(s.url, max_tokens=ENDLESS).reading()
        s.process.send_signal(signal.SIGTERM)
        s.says("draining")
        with Granted() as clock:
            s.process.send_signal(number)
            running.done()
            assert s.wait() == 0
            assert clock.now_s() < 6.0
        assert running.error is None  # a terminal event and a clean end, not a broken connection
        assert running.finishes != ["length"]


def test_row_86_a_drain_ends_in_time(tmp_path: Path) -> None:
    with server(tmp_path, drain_timeout=0.3) as s:
        running = Client(s.url, max_tokens=ENDLESS).reading()
        s.process.send_signal(signal.SIGTERM)
        running.done()
        assert s.wait() == 0
        assert "shutting_down" in running.codes or running.finishes


def test_row_86_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    with server(tmp_path, ready=False) as s:
        s.says("listening on")
        with Granted() as clock:
            s.process.send_signal(signal.SIGTERM)
            assert s.wait() == 0
            assert clock.now_s() < 5.0
        assert s.leftovers() == []


@pytest.mark.parametrize(("role", "number"), [("scheduler", signal.SIGKILL), ("scheduler", signal.SIGSEGV), ("detokenizer", signal.SIGKILL)])
def test_row_87_a_dead_child_ends_every_request_and_the_server(tmp_path: Path, role: str, number: signal.Signals) -> None:
    with server(tmp_path, detokenizer="process") as s:
        streaming, whole = Client(s.url, max_tokens=ENDLESS).reading(), Client(s.url, max_tokens=ENDLESS, stream=False)
        s.inside(2)
        pid = s.pid(role)
        with Granted() as clock:
            os.kill(pid, number)
            for client in (streaming, whole):
                client.done()
                assert client.codes == ["engine_dead"]
                assert client.error is None
            assert clock.now_s() < 2.0
            assert whole.status == 503
            assert s.wait() == 1
            assert clock.now_s() < 5.0
        s.says(number.name)
        s.says(role)
        assert s.leftovers() == []


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_row_87_a_stopped_child_is_found_by_the_watchdog(tmp_path: Path, role: str) -> None:
    with server(tmp_path, detokenizer="process", stuck_after_s=4.0) as s:
        streaming = Client(s.url, max_tokens=ENDLESS).reading()
        os.kill(s.pid(role), signal.SIGSTOP)
        streaming.done()
        assert streaming.codes == ["engine_dead"]
        assert s.wait() == 1
        s.says(f"the {role} gave no sign of life")


@pytest.mark.parametrize("stopped", [False, True])
def test_children_never_outlive_a_killed_parent(tmp_path: Path, stopped: bool) -> None:
    with server(tmp_path, detokenizer="process") as s:
        pids = [s.pid("scheduler"), s.pid("detokenizer")]
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        s.process.kill()
        for pid in pids:
            until(lambda pid=pid: gone(pid), f"end of {pid}", 5.0)  # type: ignore[misc]
        (stale,) = s.leftovers()  # nobody could remove it ...
    with server(tmp_path) as s:
        assert not stale.exists()  # ... so the next start does


def test_row_88_a_busy_port_fails_before_loading(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Granted() as clock, server(tmp_path, ready=False, port=port) as s:
            assert s.wait() == 2
            assert clock.now_s() < 5.0
            s.says(f"127.0.0.1:{port}")
            assert "started role" not in s.output


def test_row_88_two_starts_at_once_share_no_port(tmp_path: Path) -> None:
    with server(tmp_path) as first:
        port = int(first.url.rsplit(":", 1)[1])
        with server(tmp_path, ready=False, port=port) as second:
            assert second.wait() == 2
        assert health(first.url) == 200


def test_a_bad_model_ends_with_code_2_and_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00")
    command = [sys.executable, "-c", RUN, json.dumps({"port": 0, "model": str(broken)})]
    environment = {k: v for k, v in os.environ.items() if k != "ROOTLET_TEST_EXECUTOR"} | {"ROOTLET_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_row_33_clients_that_leave_free_their_place(tmp_path: Path) -> None:
    with server(tmp_path, max_running=2, detokenizer="process") as s:
        for linger in (b"\x01\x00\x00\x00\x00\x00\x00\x00", None):  # RST, then FIN
            raws = []
            for stream in (True, False):
                body = json.dumps({"prompt": "hello", "max_tokens": ENDLESS, "ignore_eos": True, "stream": stream}).encode()
                raw = socket.create_connection(("127.0.0.1", int(s.url.rsplit(":", 1)[1])), 60.0)
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                raw.sendall(head.encode() + body)
                raws.append(raw)
            raws[0].recv(1)  # the stream has begun
            s.inside(2)
            for raw in raws:
                if linger is not None:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                raw.close()
            with Granted() as clock:
                assert Client(s.url, max_tokens=4, stream=False).done().status == 200
                assert clock.now_s() < 3.0
        with Granted() as clock:
            s.process.send_signal(signal.SIGTERM)
            assert s.wait() == 0  # at once: nothing was left to drain
            assert clock.now_s() < 5.0


def test_row_89_health_answers_while_everything_is_busy(tmp_path: Path) -> None:
    with server(tmp_path, max_running=2, step_ms=20) as s:
        clients = [Client(s.url, max_tokens=2000) for _ in range(8)]
        until(lambda: any(len(c.events) > 2 for c in clients), "events", DEADLINE_S)
        s.inside(8)
        slowest = 0.0
        with Granted() as clock, httpx.Client() as probe:
            for _ in range(50):
                begun_s = clock.now_s()
                assert probe.get(f"{s.url}/health", timeout=60.0).status_code == 200
                slowest = max(slowest, clock.now_s() - begun_s)
        assert slowest < 0.5  # 0.2 s promised; the test machine is shared


def test_no_port_but_http_and_no_entry_for_others(tmp_path: Path) -> None:
    """Row 92: internal sockets are files in a directory of mode 0700."""
    with server(tmp_path, detokenizer="process") as s:
        pids = [s.process.pid, s.pid("scheduler"), s.pid("detokenizer")]
        listening = {c.laddr.port for pid in pids for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert listening == {int(s.url.rsplit(":", 1)[1])}
        (private,) = s.leftovers()
        assert private.stat().st_mode & 0o077 == 0


def test_in_process_equals_over_sockets(tmp_path: Path) -> None:
    """Architecture, section 8: in-process = over ZeroMQ."""
    from rootlet.config.load import load_config
    from rootlet.engine.engine import Engine
    from rootlet.engine.hash_model import EOS_ID, HashTemplate, HashTokenizer, hash_executor
    from rootlet.engine.model_side import FrontModel, LoadedExecutor

    config = load_config({"ctx_len": 100_000, "max_total_tokens": 400_000, "log_requests": False}, {}, None)[0]
    with Engine.over(config, LoadedExecutor(hash_executor(config), (EOS_ID,)), FrontModel(HashTokenizer(), HashTemplate(), ("m",))) as engine:
        here = engine.generate("hello", {"max_tokens": 60, "seed": 4, "stop": "Z"})
    with server(tmp_path, detokenizer="process", step_ms=0) as s:
        reply = httpx.post(f"{s.url}/v1/completions", json={"prompt": "hello", "max_tokens": 60, "seed": 4, "stop": "Z"}, timeout=60.0).json()
    assert reply["choices"][0]["text"] == here.text  # type: ignore[union-attr]
    assert reply["usage"]["completion_tokens"] == here.completion_len  # type: ignore[union-attr]
