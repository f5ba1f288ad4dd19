"""KV events of a real server: what a router foretells from them is what the server hits; who does not listen holds nobody up."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from fixtures.granted import until
from fixtures.kv_subscriber import close, program, subscriber
from fixtures.live_server import Live, body, prompt
from fixtures.ports import port_of, reserved_port
from rootlet.bench.server_process import running_server

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
PAGE = 16
IDS = 50  # the fake model knows 61 tokens


def ids(length: int, seed: int) -> list[int]:
    return [4 + i % IDS for i in prompt(length, seed)]


class Events:
    """A server that publishes, with a pool of 32 pages, and its two endpoints."""

    def __init__(self, server: Live, events: str, replay: str) -> None:
        self.server, self.events, self.replay = server, events, replay
        self._fresh = itertools.count(1000)

    def publish_until(self, heard: Callable[[], bool]) -> None:
        """A subscription takes a moment to arrive, and what is published before it is not heard: prompts that nobody had, until one is."""

        def try_again() -> bool:
            self.server.ask(body(ids(40, next(self._fresh)), 1))
            return heard()

        until(try_again, "the subscriber hears", 60.0)

    def assert_live(self) -> None:
        """LIVE of the fault table, in the words of this vocabulary."""
        (reply,) = self.server.ask(body(ids(12, 7), 8))
        assert len(reply.one.ids) == 8
        assert self.server.children() == self.server.pids
        assert "Traceback" not in self.server.server.log.read_text(errors="replace")
        self.server.assert_exact()

    def num_batches(self) -> int:
        return int(self.server.metrics()["rootlet_kv_event_batches_total"])

    def num_blocks(self) -> int:
        m = self.server.metrics()
        return int(m['rootlet_kv_pages{state="cached"}'] + m['rootlet_kv_pages{state="locked"}'])


@pytest.fixture(scope="module")
def published() -> Iterator[Events]:
    with reserved_port() as one, reserved_port() as other:
        events, replay = (f"tcp://127.0.0.1:{port_of(port)}" for port in (one, other))
        flags = ("--max-total-tokens", "512", "--max-running", "4", "--kv-events", events, "--kv-events-replay", replay, "--log-level", "warning")
        with running_server(*flags, env={**os.environ, "ROOTLET_TEST_EXECUTOR": "hash_lm", "ROOTLET_CHECK": "1"}) as server:
            yield Events(Live(server), events, replay)


def test_hits_are_foretold_through_evictions_and_a_flush(published: Events) -> None:
    server, blocks = published.server, subscriber(published.events, published.replay)
    foretold = []
    try:
        published.publish_until(lambda: blocks.read(100))
        for i in range(30):
            if i == 20:
                server.assert_flushes()
            until(lambda: blocks.read(20) or blocks.next == published.num_batches(), "the subscriber is up to date", 60.0)
            until(lambda: not blocks.read(0) and blocks.next >= published.num_batches(), "the subscriber has all batches", 60.0)
            assert len(blocks.parents) == published.num_blocks()
            asked = ids(40, i % 4) + ids(25, 10 + i % 3)
            foretold.append(blocks.cached_len(asked[:-1], PAGE))  # the last token is always computed
            (reply,) = server.ask(body(asked, 4))
            assert reply.one.meta["cached_tokens"] == foretold[-1]
    finally:
        close(blocks)
    assert set(foretold) >= {0, 32}  # nothing, and a beginning that two prompts have in common
    assert server.metrics()["rootlet_evicted_pages_total"] > 0
    assert foretold[20] == 0
    published.assert_live()


def test_the_program_of_the_page_works_as_printed(published: Events, tmp_path: Path) -> None:
    script = tmp_path / "subscriber.py"
    script.write_text(program())
    published.server.ask(body(ids(100, 77), 4))
    told = tmp_path / "told"  # read by its path: a handle that two processes share has one place in the file for both
    with told.open("wb") as out:
        process = subprocess.Popen([sys.executable, str(script), published.events, published.replay], stdout=out, stderr=subprocess.STDOUT)
        try:
            # each line tells of a batch; the last one is what the server holds
            def last_line() -> str:
                return (told.read_text().splitlines() or [""])[-1]

            def tells_all() -> bool:
                return last_line() == f"batch {published.num_batches() - 1}: {published.num_blocks()} blocks"

            until(tells_all, last_line, 60.0)
            caught_up = last_line()
            published.publish_until(lambda: last_line() != caught_up)
            for seed in range(3):
                published.server.ask(body(ids(60, 80 + seed), 4))
                until(tells_all, last_line, 60.0)
        finally:
            process.kill()
            process.wait()


def test_who_does_not_listen_holds_nobody_up(published: Events, tmp_path: Path) -> None:
    server = published.server
    script = tmp_path / "sleeper.py"
    script.write_text(program())
    sleeper = subprocess.Popen([sys.executable, str(script), published.events, published.replay], stdout=subprocess.PIPE)
    deaf: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    host, _, port = published.events.removeprefix("tcp://").partition(":")
    stray = [socket.create_connection((host, int(p))) for p in (port, published.replay.rpartition(":")[2]) for _ in range(3)]
    greedy: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    try:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline()
        sleeper.send_signal(signal.SIGSTOP)
        deaf.rcvhwm = 1
        deaf.connect(published.events)
        deaf.subscribe(b"")
        greedy.rcvhwm = 1
        greedy.connect(published.replay)
        for half in (stray[0], stray[3]):
            half.send(b"GET / HTTP/1.1\r\n\r\n")
        stray[1].send(b"\xff" * 5000)
        for _ in range(50):
            greedy.send_multipart([b"", bytes(8)])
        replies = server.ask(*(body(ids(60, 200 + i), 4) for i in range(60)), at_once=8)
        assert all(len(reply.one.ids) == 4 for reply in replies)
        assert server.metrics()["rootlet_kv_event_batches_dropped_total"] == 0
        num_batches = published.num_batches()  # before the replay is asked for: an answer holds all that was published till then
        blocks = subscriber(published.events, published.replay)
        assert blocks.next == num_batches
        close(blocks)
        published.assert_live()
    finally:
        sleeper.kill()
        sleeper.communicate()
        for held in (deaf, greedy):
            held.close(linger=0)
        for half in stray:
            half.close()


def test_a_taken_endpoint_ends_the_start_with_the_users_exit_code(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "rootlet.cli.main", "serve", "--port", "0", "--kv-events", endpoint]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env={**os.environ, "ROOTLET_TEST_EXECUTOR": "hash_lm"}, check=False
        )
    assert done.returncode == 2, done.stderr
    assert f"--kv-events {endpoint}: cannot listen there" in done.stderr
    assert "Traceback" not in done.stderr
