"""Pinned prefixes: kept from eviction for their time, and never in anybody's way."""

from __future__ import annotations

from typing import Any

from fixtures.script import Script, generate, pack, prompt_of
from rootlet.ipc.messages import FlushCacheReq, GetStateReq, PinReq
from rootlet.scheduler.pins import MAX_PINS

PREFIX = prompt_of(32)


def ask(script: Script, action: Any, **fields: Any) -> dict[str, Any]:
    script.turn(PinReq("q", action, **fields))
    return dict(script.answers[-1].state)


def pin(script: Script, ids: list[int] = PREFIX, ttl_s: float = 60.0, **fields: Any) -> dict[str, Any]:
    return ask(script, "pin", input_ids=pack(ids), ttl_s=ttl_s, **fields)


def cached(script: Script, rid: str) -> int:
    script.run(generate(rid, [*PREFIX, 5], 1))
    return script.replies[rid].cached_len


def fill(script: Script, name: str) -> None:
    """Other prompts, until everything that may be evicted is."""
    for i in range(6):
        script.run(generate(f"{name}{i}", prompt_of(40, 1 + i), 1))


def test_a_pinned_prefix_survives_what_evicts_another_and_ends_with_its_time() -> None:
    script = Script(num_pages=24, page_size=4)
    script.run(generate("seed", PREFIX, 1))
    fill(script, "a")
    assert cached(script, "not pinned") == 0
    assert pin(script, [*PREFIX, 9, 9]) == {"pin_id": "pin-1", "tokens": 32, "of": 34, "ttl_s": 60.0}
    fill(script, "b")
    assert cached(script, "pinned") == 32
    assert ask(script, "list") == {"pins": [{"pin_id": "pin-1", "tokens": 32, "ttl_s": 60.0}]}
    script.clock.advance(61.0)
    script.turn()
    assert ask(script, "list") == {"pins": []}
    fill(script, "c")
    assert cached(script, "over") == 0
    script.check_all_replies()


def test_only_what_is_cached_in_the_same_namespace_can_be_pinned() -> None:
    script = Script()
    script.run(generate("seed", PREFIX, 1))
    assert pin(script, prompt_of(32, 5))["pin_id"] is None
    assert pin(script, extra_key="other")["pin_id"] is None
    assert script.scheduler.state.kv.cache.stats()["locks"] == 0
    assert pin(script, PREFIX[:6])["tokens"] == 4
    assert ask(script, "unpin", pin_id="pin-7") == {"unpinned": []}
    assert ask(script, "unpin") == {"unpinned": ["pin-1"]}
    script.check_all_replies()


def test_pins_yield_to_a_request_that_could_never_run() -> None:
    script = Script(num_pages=24, page_size=4)
    script.run(generate("seed", PREFIX, 1))
    pin(script)
    script.run(generate("other", prompt_of(24, 3), 1))
    pin(script, prompt_of(24, 3))
    script.run(generate("big", prompt_of(60, 2), 8))  # 17 pages; 14 of 24 are pinned
    assert [p["pin_id"] for p in ask(script, "list")["pins"]] == ["pin-2"]  # the oldest went, and only that
    ask(script, "unpin")
    script.check_all_replies()


def test_pins_yield_to_the_last_request_that_decodes() -> None:
    script = Script(num_pages=16, page_size=4, conservativeness=0.0)
    script.run(generate("seed", PREFIX, 1))
    script.turn(generate("grows", prompt_of(4, 3), 50))
    pin(script)
    script.run()
    script.check_reply("grows")
    assert ask(script, "list") == {"pins": []}
    script.check_all_replies()


def test_a_flush_ends_all_pins_and_their_number_is_limited() -> None:
    script = Script()
    script.run(generate("seed", PREFIX, 1))
    for _ in range(MAX_PINS):
        pin(script)
    assert f"{MAX_PINS} prefixes are pinned" in pin(script)["error"]
    script.turn(GetStateReq("m", "metrics"))
    assert script.answers[-1].state["gauges"]["pins"] == MAX_PINS
    script.turn(FlushCacheReq("f"))
    assert script.answers[-1].success
    assert ask(script, "list") == {"pins": []}
    assert script.scheduler.state.kv.ledger()["free"] == 64


def test_what_holds_the_queue_back_is_counted_by_reason() -> None:
    script = Script(max_running=1)
    script.turn(*(generate(f"r{i}", prompt_of(6, i), 5) for i in range(4)))
    script.turn()
    script.turn(GetStateReq("m", "metrics"))
    assert script.answers[-1].state["queue"] == {"rows": 3}
    script.run()
    script.turn(GetStateReq("m", "metrics"))
    assert script.answers[-1].state["queue"] == {}
