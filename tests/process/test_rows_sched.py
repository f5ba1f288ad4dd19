"""Rows SCHED of the fault table (40, 41, 43, 44, 45) on real servers: who is admitted, who gives way, and that nobody's tokens change by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fixtures.granted import Granted, until
from fixtures.live_server import Live, Reply, Solo, body, live, prompt, tiny_flags, tiny_llama

pytestmark = pytest.mark.process

slow = pytest.mark.slow
POOL = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("sched"))


@pytest.fixture(scope="module")
def solo16(model: Path) -> Solo:
    """For pages that native attention takes: they give the same bits."""
    return Solo(model, 16)


@pytest.fixture(scope="module")
def solo1(model: Path) -> Solo:
    return Solo(model, 1)


@pytest.fixture(scope="module", params=["1", "2"])
def tiny(model: Path, request: pytest.FixtureRequest) -> Iterator[Live]:
    with live(model, *tiny_flags(), "--depth", request.param) as server:
        yield server


def idle_cpu_s(server: Live) -> float:
    """Processor time of half a second in which nobody asks anything."""

    def used_s() -> float:
        return float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in [server.main_pid, *server.pids]))

    before_s = used_s()
    try:
        psutil.Process(server.main_pid).wait(0.5)
    except psutil.TimeoutExpired:
        return used_s() - before_s
    raise AssertionError("the server ended")


@pytest.mark.parametrize(
    ("page", "pool"), [(2, 512), (16, 4096), pytest.param(2, 4096, marks=[slow, pytest.mark.timeout(1800)]), pytest.param(16, 512, marks=slow)]
)
def test_row_40_a_tiny_chat_without_max_tokens_in_a_small_pool(model: Path, page: int, pool: int) -> None:
    with live(model, *tiny_flags(ctx=4096, pool=pool, page=page), check=False) as server:
        fresh_s = idle_cpu_s(server)
        for extra in ({}, {"max_tokens": 4096}):
            first_s, events = chat(server, {"messages": [{"role": "user", "content": "ab"}], "ignore_eos": True, "temperature": 0, **extra})
            assert first_s < 5.0
            finishes = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
            assert finishes == ["length"]
            usage = events[-1]["usage"]
            assert usage["total_tokens"] == min(pool + 1, 4096)  # the last token drawn needs no place
        until(lambda: idle_cpu_s(server) <= fresh_s + 0.03, "a processor as idle as at first", 5.0)  # an endless admission loop takes all of it
        server.assert_live()


def chat(server: Live, request: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """(seconds granted to the first event with text, all events) of a streamed chat."""
    first_s, events = 0.0, []
    request = {**request, "stream": True, "stream_options": {"include_usage": True}}
    url = f"{server.server.base}/v1/chat/completions"
    with Granted() as clock, httpx.stream("POST", url, json=request, timeout=240.0) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if not first_s and any(choice["delta"].get("content") for choice in events[-1]["choices"]):
                    first_s = clock.now_s()
    return first_s, events


def test_row_41_what_can_never_fit_is_refused_and_blocks_nobody(tiny: Live) -> None:
    smalls = [body(prompt(8 + i, 500 + i), 6) for i in range(5)]
    for length in (500, 511, 512, 513, 600, 1500):
        large, *others = tiny.ask(body(prompt(length, length), 1), *smalls)
        if length <= POOL:
            assert len(large.one.ids) == 1
        else:
            assert_names_the_pool(large, length)
            assert large.end_s < 2.0
        for other in others:
            assert len(other.one.ids) == 6
            assert other.end_s < 5.0
    cut, *others = tiny.ask(body(prompt(480, 1), 100, stream=True), *smalls)
    assert len(cut.one.ids) == POOL - 480 + 1
    assert cut.one.meta["finish_reason"] == {"type": "length", "length": POOL - 480 + 1}
    assert all(len(other.one.ids) == 6 and other.end_s < 5.0 for other in others)
    assert f"KV pool {POOL} tokens" in tiny.server.log.read_text()
    tiny.assert_live()


def assert_names_the_pool(reply: Reply, length: int) -> None:
    assert reply.status == 400
    assert reply.error is not None
    assert (reply.error["code"], reply.error["type"]) == ("kv_pool_exceeded", "invalid_request_error")
    for part in (str(length), str(POOL), "--max-total-tokens"):
        assert part in reply.error["message"]


def test_row_41_too_long_streams_and_batches_are_refused_before_they_begin(tiny: Live) -> None:
    stream, whole = tiny.ask(body(prompt(513, 1), 1, stream=True), {**body([], 1), "input_ids": [prompt(5, 1), prompt(600, 2), prompt(7, 3)]})
    assert_names_the_pool(stream, 513)
    assert_names_the_pool(whole, 600)
    tiny.assert_exact()


def test_row_43_one_request_may_fill_the_pool(tiny: Live) -> None:
    lonely = body(prompt(100, 1), 2000, stream=True)
    room = POOL - 100 + 1
    (one,) = tiny.ask(lonely)
    three = tiny.ask(*(body(prompt(100, seed), 2000, stream=True) for seed in (1, 2, 3)))
    for reply in (one, *three):
        assert len(reply.one.ids) == room
        assert reply.one.meta["finish_reason"] == {"type": "length", "length": room}
    assert three[0].drawn == one.drawn
    tiny.assert_live()


def mixed_load(seed: int, *, num: int = 16, max_new: int = 200) -> list[dict[str, Any]]:
    """Row 44's mix: greedy, seeded, with logprobs, two choices, with a shared prefix. Streamed."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 11},
        {"logprobs": 1},
        {"n": 2, "temperature": 0.8, "seed": 5},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.5, "seed": 3, "logprobs": 2},
    ]
    made = []
    for i in range(num):
        length = 40 + (7 * i + seed) % 51
        shared = prompt(32, 99) if i % 3 == 0 else []
        ids = (shared + prompt(90, 100 * seed + i))[:length]
        made.append(body(ids, max_new, stream=True, **kinds[i % len(kinds)]))
    return made


CASES_44 = [
    pytest.param(1, "1", marks=slow), (1, "2"), (16, "1"), (16, "2"), pytest.param(64, "1", marks=slow), (64, "2"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "depth"), CASES_44)
def test_row_44_retracted_streams_equal_solo_runs(model: Path, solo1: Solo, solo16: Solo, page: int, depth: str) -> None:
    if page == 1:
        run_row_44(model, solo1, page, depth, [mixed_load(0, num=6)])
    else:
        run_row_44(model, solo16, page, depth, [mixed_load(0)])


@slow
@pytest.mark.parametrize("depth", ["1", "2"])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_row_44_five_rounds(model: Path, solo1: Solo, solo16: Solo, page: int, depth: str) -> None:
    run_row_44(model, solo1 if page == 1 else solo16, page, depth, [mixed_load(seed) for seed in range(5)])


def run_row_44(model: Path, solo: Solo, page: int, depth: str, loads: list[list[dict[str, Any]]]) -> None:
    expected = [solo.of(load) for load in loads]
    with live(model, *tiny_flags(page=page), "--depth", depth) as server:
        for load, alone in zip(loads, expected, strict=True):
            replies = server.ask_together(*load)
            for request, reply, right in zip(load, replies, alone, strict=True):
                assert reply.drawn == right.drawn
                for choice in reply.choices:
                    assert len(choice.ids) == choice.meta["completion_tokens"] == request["sampling_params"]["max_new_tokens"]
                    assert len(choice.logprobs) == (len(choice.ids) if "return_logprob" in request else 0)
            server.assert_exact()
        assert server.metrics()["rootlet_retractions_total"] > 0
        server.assert_live()
        server.assert_flushes()


def test_row_44_a_schema_is_refused_not_ignored(tiny: Live) -> None:
    """Until output can be constrained: 501, never free text."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    request = {"messages": [{"role": "user", "content": "hi"}], "response_format": schema, "max_tokens": 4}
    reply = httpx.post(f"{tiny.server.base}/v1/chat/completions", json=request, timeout=60.0)
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "unsupported")


@pytest.mark.parametrize("depth", ["1", "2"])
def test_row_45_short_prefills_passing_by_leave_long_decodes_alone(model: Path, solo16: Solo, depth: str) -> None:
    longs = [body(prompt(50 + i, 900 + i), 400, stream=True) for i in range(2)]
    shorts = [body(prompt(1 + 13 * i % 150, 1000 + i), 1 + i % 3) for i in range(60)]
    expected = [reply.drawn for reply in solo16.of([*longs, *shorts])]
    with live(model, *tiny_flags(pool=4096), "--depth", depth) as server:
        assert [reply.drawn for reply in asyncio.run(pass_by(server, longs, shorts))] == expected
        server.assert_live()


async def pass_by(server: Live, longs: list[dict[str, Any]], shorts: list[dict[str, Any]]) -> list[Reply]:
    """The long ones in the background, the short ones one after another."""
    async with server.session() as session:
        background = [asyncio.ensure_future(server.generate(session, item)) for item in longs]
        passing = [await server.generate(session, item) for item in shorts]
        return [*await asyncio.gather(*background), *passing]
