"""What is measured, and that every documented name is exported."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fixtures.cache_bench import CacheBench
from fixtures.fake_manager import FakeManager, Script, chunks_of
from fixtures.fake_tier import FakeTier
from rootlet.cache.types import EvictReason
from rootlet.core.clock import VirtualClock
from rootlet.core.errors import QueueFull
from rootlet.core.types import Finish, FinishKind
from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.metrics import names
from rootlet.metrics.instruments import Instruments
from rootlet.metrics.prometheus import flatten, render

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
REQ = GenerateReq(prompt="hello")


def samples(meters: Instruments, state: dict[str, object] | None = None, *, is_up: bool = True) -> dict[str, float]:
    text = render(meters.registry, state or {}, is_up=is_up).decode()
    out = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return out


async def played(clock: VirtualClock, *scripts: Script) -> AsyncGenerator[GenerateChunk, None]:
    for index, script in enumerate(scripts):
        for chunk in chunks_of(script, REQ, index, b"hello"):
            clock.advance(0.5)
            yield chunk


def test_a_request_is_counted_once_with_its_times() -> None:
    meters, clock = Instruments(), VirtualClock()

    async def go() -> None:
        async for _ in meters.observe(played(clock, Script(("a", "bc"), finish=Finish(FinishKind.STOP, 256))), clock):
            assert meters.num_in_flight == 1

    asyncio.run(go())
    got = samples(meters)
    assert meters.num_in_flight == 0
    assert got["rootlet_requests_total{outcome=stop}"] == 1
    assert got["rootlet_prompt_tokens_total"] == 5
    assert got["rootlet_cached_tokens_total{tier=device}"] == 4
    assert got["rootlet_generated_tokens_total"] == 4
    assert got["rootlet_time_to_first_token_seconds_sum"] == 0.5
    # tokens 2 and 3 came together 0.5 s later, the stop token another 0.5 s later
    assert got["rootlet_inter_token_latency_seconds_count"] == 3
    assert got["rootlet_inter_token_latency_seconds_sum"] == 1.0
    assert got["rootlet_time_per_output_token_seconds_sum"] == pytest.approx(1.0 / 3)
    assert got["rootlet_e2e_latency_seconds_sum"] == 1.5
    assert got["rootlet_queue_seconds_sum"] == 0.25
    assert got["rootlet_request_retractions_total"] == 1


def test_refused_and_abandoned_requests_have_their_own_outcomes() -> None:
    meters, clock = Instruments(), VirtualClock()

    async def refused() -> AsyncGenerator[GenerateChunk, None]:
        raise QueueFull("full")
        yield

    async def go() -> None:
        with pytest.raises(QueueFull):
            async for _ in meters.observe(refused(), clock):
                pass
        abandoned = meters.observe(played(clock, Script(("a",)), Script(("b",))), clock)
        await anext(abandoned)
        await abandoned.aclose()
        failed = Script(("a",), finish=Finish(FinishKind.ERROR, status=500))
        async for _ in meters.observe(played(clock, failed), clock):
            pass

    asyncio.run(go())
    got = samples(meters)
    assert got["rootlet_requests_total{outcome=refused}"] == 1
    assert got["rootlet_requests_total{outcome=abort}"] == 1
    assert got["rootlet_requests_total{outcome=error}"] == 1
    assert meters.num_in_flight == 0


def test_two_servers_in_one_process_do_not_share_counters() -> None:
    one, two = Instruments(), Instruments()
    one.count(names.REQUESTS, outcome="stop")
    assert "rootlet_requests_total{outcome=stop}" not in samples(two)


STATE: dict[str, object] = {
    "gauges": {
        "running": 2, "waiting": 3, "decode": 1,
        "kv_free_pages": 5, "kv_evictable_pages": 6, "kv_protected_pages": 7, "kv_private_pages": 2, "kv_total_pages": 20,
    },
    "counters": {"retractions": 4, "preemptions": 1},
    "queue": {"pages": 3, "gate": 1},
    "cache": {
        "free_pages": 99, "lookup_tokens": 100, "hit_tokens": {"device": {"all": 30, "full": 40, "swa": 35}, "host": {"all": 7}},
        "evictions": {"device": {"full": {"admission": 8, "growth": 2}, "swa": {"growth": 9}}}, "evicted_pages": 10,
    },
    "kv_events": {"published_batches": 11, "dropped_batches": 1},
    "note": "text", "flag": True,
}  # fmt: skip


def test_the_engines_numbers_get_their_documented_names() -> None:
    got = samples(Instruments(), STATE)
    assert (got["rootlet_running_requests"], got["rootlet_waiting_requests"], got["rootlet_retractions_total"]) == (2, 3, 4)
    assert [got[f"rootlet_kv_pages{{state={s}}}"] for s in ("free", "cached", "locked", "private", "total")] == [5, 6, 7, 2, 20]
    assert (got["rootlet_queued_requests{reason=pages}"], got["rootlet_queued_requests{reason=gate}"]) == (3, 1)
    assert got["rootlet_cache_lookup_tokens_total"] == 100
    hits = {("device", "all"): 30, ("device", "full"): 40, ("device", "swa"): 35, ("host", "all"): 7}
    assert {k: got[f"rootlet_cache_hit_tokens_total{{component={k[1]},tier={k[0]}}}"] for k in hits} == hits
    assert (got["rootlet_kv_event_batches_total"], got["rootlet_kv_event_batches_dropped_total"]) == (11, 1)
    assert got["rootlet_scheduler_state{key=gauges.decode}"] == 1
    assert got["rootlet_scheduler_state{key=cache.free_pages}"] == 99
    assert got["rootlet_engine_up"] == 1
    assert samples(Instruments(), is_up=False)["rootlet_engine_up"] == 0


def test_evictions_are_counted_by_tier_component_and_reason() -> None:
    got = samples(Instruments(), STATE)
    given_up = {("full", "admission"): 8, ("full", "growth"): 2, ("swa", "growth"): 9}
    assert {k: got[f"rootlet_evictions_total{{component={k[0]},reason={k[1]},tier=device}}"] for k in given_up} == given_up
    assert got["rootlet_evicted_pages_total"] == 10
    odd = samples(Instruments(), {"cache": {"evictions": {"device": 3}}})  # not as deep as the labels say: shown, but under its key
    assert odd["rootlet_scheduler_state{key=cache.evictions.device}"] == 3


def test_every_number_of_a_real_scheduler_is_there_once() -> None:
    from fixtures.script import Script as Play
    from fixtures.script import generate, prompt_of

    play = Play(num_pages=8).run(generate("a", prompt_of(9)), generate("b", prompt_of(20, 1)), generate("c", prompt_of(20, 1)))
    state = play.scheduler.control.metrics()
    got = samples(Instruments(), state)
    assert got["rootlet_cache_lookup_tokens_total"] >= 49 - 3
    hits = [got[f"rootlet_cache_hit_tokens_total{{component={part},tier=device}}"] for part in ("all", "full")]
    assert hits[0] == hits[1] >= state["counters"]["cached_tokens"] > 0, "full attention alone is all that this model has"
    assert got["rootlet_kv_pages{state=total}"] == 8 == sum(got[f"rootlet_kv_pages{{state={s}}}"] for s in ("free", "cached", "locked", "private"))
    evictions = sum(value for name, value in got.items() if name.startswith("rootlet_evictions_total{component=full"))
    assert got["rootlet_evicted_pages_total"] == evictions > 0
    assert got["rootlet_kv_pages{state=leaked}"] == 0


@pytest.mark.parametrize("others", [{}, {"window": (3, 40), "states": (2, 20)}])
def test_every_number_of_a_host_tier_has_a_name_of_its_own(others: dict[str, Any]) -> None:
    """A cache with a tier whose host is too small, as it is: evictions there, copies, room; nothing of it only under `rootlet_scheduler_state`."""
    bench = CacheBench(page_size=2, num_pages=12, tier=FakeTier({"full": 4, "swa": 4, "mamba": 4} if others else {"full": 4}), **others)
    for k in range(6):
        for tail in ([3, 4], [7, 7, 7, 7]):
            bench.serve([10 * k + 1, 10 * k + 2, *tail])
            bench.settle()
    stats = bench.cache.stats()
    text = render(Instruments().registry, {"cache": stats}, is_up=True).decode()
    got = samples(Instruments(), {"cache": stats})
    assert bench.host is not None
    counted = bench.host.evictions
    assert any(reason is EvictReason.HOST_PRESSURE and count for (_, reason), count in counted.items())
    for (component, reason), count in counted.items():
        assert got[f"rootlet_evictions_total{{component={component},reason={reason.value},tier=host}}"] == count
    assert got["rootlet_cache_units{component=full,state=total,tier=host}"] == 4
    assert got["rootlet_host_pages_total{event=backed_up}"] == stats["backed_up_pages"] > 0
    assert got["rootlet_host_copies_in_flight"] == 0
    lost = samples(Instruments(), {"cache": {"copies_failed": 2, "copies_skipped_no_host_room": 3, "copies_skipped_no_device_room": 4}})
    assert [lost[f"rootlet_host_copies_lost_total{{reason={r}}}"] for r in ("failed", "no_host_room", "no_device_room")] == [2, 3, 4]
    assert not [name for name in got if "scheduler_state" in name and re.search(r"host|copies|backed|loaded|demoted|_(total|free|held)}$", name)]
    for name, kind in (("evictions", "counter"), ("host_pages", "counter"), ("cache_units", "gauge"), ("host_copies_lost", "counter")):
        assert re.search(rf"^# HELP rootlet_{name}(_total)? \S", text, re.MULTILINE)
        assert re.search(rf"^# TYPE rootlet_{name}(_total)? {kind}$", text, re.MULTILINE)


def test_flatten_takes_numbers_only() -> None:
    assert dict(flatten({"a": {"b": 1, "c": [1], "d": True}, "e": 2.5, "f": "x"})) == {"a.b": 1.0, "e": 2.5}


def test_the_documentation_lists_exactly_the_names_that_exist() -> None:
    documented = set(re.findall(r"^\| `(rootlet_[a-z0-9_]+)` \|", DOCS.read_text(), re.MULTILINE))
    assert documented == {metric.name for metric in names.ALL}


def test_http_requests_are_counted_by_route_template() -> None:
    from fixtures.asgi import call, post
    from fixtures.fake_manager import config
    from rootlet.server.app import build_app

    app = build_app(FakeManager(), config())
    post(app, "/v1/completions", {"prompt": "x"})
    call(app, "GET", "/v1/models/tiny")
    call(app, "GET", "/no/such/" + "x" * 50)
    text = call(app, "GET", "/metrics").text
    assert 'rootlet_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0' in text
    assert 'rootlet_http_requests_total{method="GET",route="/v1/models/{model_id:path}",status="200"} 1.0' in text
    assert 'rootlet_http_requests_total{method="GET",route="unmatched",status="404"} 1.0' in text
