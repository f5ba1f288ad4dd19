"""`rootlet trace` and `rootlet cache` as a person meets them."""

from __future__ import annotations

import io
import re
import urllib.request

import pytest

from fixtures.ports import port_of, reserved_port
from rootlet.cli import remote
from rootlet.cli.app import app
from rootlet.core.errors import InvalidValue, Unavailable

FOUND = {
    "rid": "r", "phase": "waiting", "prompt_len": 20, "max_new": 8, "priority": 1, "user": "u", "dropped_events": 2,
    "events": [
        {"time_s": 0.0, "tick": 1, "what": "queued", "gated": True},
        {"time_s": 0.5, "tick": 7, "what": "admitted", "matched": 16, "of": 20,
         "waited": [{"reason": "rows", "why": "rows: needs 1, has 0", "first_tick": 2, "last_tick": 6, "ticks": 5}]},
        {"time_s": 0.6, "tick": 8, "what": "chunk", "number": 1, "start": 16, "stop": 20, "of": 20, "step": 4},
        {"time_s": 0.7, "tick": 9, "what": "first token"},
        {"time_s": 0.8, "tick": 10, "what": "preempted", "outputs": 3},
        {"time_s": 0.9, "tick": 11, "what": "finished", "why": "error", "outputs": 3, "code": "deadline_exceeded"},
    ],
    "waiting_for": [{"reason": "pages", "why": "pages: needs 3, has 2", "first_tick": 11, "last_tick": 11, "ticks": 1}],
}  # fmt: skip


def test_explain_is_one_line_a_turning_point_and_one_for_each_reason_to_wait() -> None:
    lines = list(remote.explain(FOUND))
    assert lines[0] == "r: waiting; prompt 20 tokens, at most 8 new, priority 1, user u"
    assert [line.split("  ")[-1] for line in lines[2:]] == [
        "queued, at a gate before the queue",
        "waited 5 ticks: rows: needs 1, has 0",
        "admitted: 16 of 20 tokens were in the cache",
        "chunk 1: tokens 16..19 of 20, in step 4",
        "first token",
        "preempted: gave its KV back with 3 tokens drawn, waits again",
        "finished: error after 3 tokens (deadline_exceeded)",
        "(2 events in the middle were not kept)",
        "waited 1 tick: pages: needs 3, has 2",
    ]


def test_cache_speaks_to_the_right_routes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, object]] = []

    def call(url: str, key: str | None, path: str, body: object = None) -> str:
        asked.append((path, body))
        return "{}"

    monkeypatch.setattr(remote, "call", call)
    remote.cache("tree")
    remote.cache("stats")
    remote.cache("flush", wait=2.5)
    remote.cache("pin", "hello", ttl=9.0)
    remote.cache("pin", ids="1,2")
    remote.cache("unpin", "pin-1")
    remote.cache("unpin")
    assert asked == [
        ("/cache/tree", None),
        ("/cache/stats", None),
        ("/flush_cache?timeout=2.5", {}),
        ("/cache/pin", {"text": "hello", "ttl_s": 9.0}),
        ("/cache/pin", {"input_ids": [1, 2], "ttl_s": 300.0}),
        ("/cache/unpin", {"pin_id": "pin-1"}),
        ("/cache/unpin", {"all": True}),
    ]
    assert capsys.readouterr().out
    for bad in ({}, {"prefix": "x", "ids": "1"}, {"ids": "1,x"}):
        with pytest.raises(InvalidValue):
            remote.cache("pin", **bad)


def test_no_server_is_said_in_one_line() -> None:
    with reserved_port() as silent:
        url = f"http://127.0.0.1:{port_of(silent)}"
        with pytest.raises(Unavailable, match=f"no server answers at {re.escape(url)}"):
            remote.call(url, None, "/cache/tree")


@pytest.mark.parametrize("url", ["{host}", "http://{host}/", "{host}/v1", "http://{host}/v1/"])
def test_an_address_may_be_the_one_that_clients_use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def urlopen(request: urllib.request.Request, **_: object) -> io.BytesIO:
        asked.append(request.full_url)
        return io.BytesIO(b"{}")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    remote.call(url.format(host="127.0.0.1:4"), None, "/cache/stats")
    assert asked == ["http://127.0.0.1:4/cache/stats"]


def test_the_help_of_trace_says_which_id_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    app(["trace", "--help"], result_action="return_value")
    assert "the id of its reply" in capsys.readouterr().out


def test_a_bare_port_is_no_address() -> None:
    with pytest.raises(InvalidValue, match=r"--url 30000: expected something like 127\.0\.0\.1:30000"):
        remote.call("30000", None, "/cache/stats")
