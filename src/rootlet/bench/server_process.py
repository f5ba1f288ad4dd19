"""Starts a real `rootlet serve` for a measurement or a test and ends it by its id. It takes a free port of 127.0.0.1 itself and says which."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENING = re.compile(r"listening on (http://\S+)")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass(slots=True)
class ServerProcess:
    """A running server; `log` holds everything it printed. `base`: its address, "" until it has said so."""

    base: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, timeout_s: float = 60.0) -> bytes:
        with urllib.request.urlopen(self.base + path, timeout=timeout_s) as reply:
            return bytes(reply.read())

    def state(self) -> dict[str, object]:
        return dict(json.loads(self.get("/get_server_info")))

    def wait_ready(self, timeout_s: float) -> None:
        """Reads the address from the log, then polls `/ready` until it answers 200. Raises with the log's tail at the end of process or time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if not self.base:
                told = _LISTENING.search(self.log.read_text(errors="replace"))
                self.base = told[1] if told else ""
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                if self.base:
                    self.get("/ready", timeout_s=2.0)
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.1)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"server not ready (exit {self.process.poll()}):\n{tail}")

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM and wait; SIGKILL past the timeout. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextlib.contextmanager
def running_server(*flags: str, port: int = 0, env: dict[str, str] | None = None, ready_timeout_s: float = 120.0) -> Iterator[ServerProcess]:
    """`rootlet serve FLAGS`, ready; stopped at the end of the block. Port 0: the server picks one, so that nobody can take it in between."""
    with tempfile.TemporaryDirectory(prefix="rootlet-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "rootlet.cli.main", "serve", *flags, "--port", str(port)]
            server = ServerProcess("", subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env), log)
            try:
                server.wait_ready(ready_timeout_s)
                yield server
            finally:
                server.stop()
