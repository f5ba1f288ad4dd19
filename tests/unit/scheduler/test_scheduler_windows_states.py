"""Windows and states from admission to the end of a request: what is held when, where chunks end, who hits what, and that nothing of it shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fixtures.script import PARTS, Script, generate, parts_of, prompt_of, tokens_of
from rootlet.cache.request_states import RequestStates
from rootlet.cache.request_window import RequestWindow
from rootlet.cache.types import EvictReason
from rootlet.config.schema import CacheArgs
from rootlet.core.errors import BadConfig
from rootlet.core.hash_lm import MODES
from rootlet.core.step import StepPlan
from rootlet.core.types import Phase
from rootlet.ipc.messages import AbortReq
from rootlet.memory.state_allocator import StateAllocator
from rootlet.scheduler.state import retract_req

OTHERS = [parts for parts in PARTS if parts != "full"]


def script_with(
    parts: str, *, page_size: int = 4, capacity: dict[str, int] | None = None, sizes: dict[str, int] | None = None, **options: Any
) -> Script:
    fields = {**parts_of(parts, page_size=page_size, **(sizes or {})), **(capacity or {})}
    return Script(page_size=page_size, capacity=fields, **options)


def one(script: Script, rid: str, prompt: list[int], max_new: int = 3) -> int:
    """Serve it alone; how much of it was cached."""
    script.run(generate(rid, prompt, max_new))
    script.check_reply(rid)
    return script.replies[rid].cached_len


def mixed_load(**options: Any) -> list[Any]:
    return [generate(f"r{i}", prompt_of(13 + 9 * i, i % 2, shared=12), 9 + i, temperature=0.8, **options) for i in range(5)]


def assert_everything_is_back(script: Script) -> None:
    keeper = script.scheduler.state.kv.cache.keeper
    for name, pool in keeper.pools.items():
        assert keeper.available(name) == pool.num_pages, name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("parts", OTHERS)
def test_windows_and_states_change_no_token(parts: str, depth: int, mode: Any) -> None:
    plain = tokens_of(mixed_load())
    for chunk, mixed in ((0, False), (16, True), (40, False)):
        script = script_with(parts, depth=depth, mode=mode, chunked_prefill=chunk, mixed_chunk=mixed).run(*mixed_load())
        script.check_all_replies()
        assert {rid: reply.tokens for rid, reply in script.replies.items()} == plain
        assert_everything_is_back(script)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("grid_pages", [1, 2])
def test_the_second_sharer_makes_the_state_that_the_third_hits(grid_pages: int, depth: int) -> None:
    script = script_with("full+mamba", depth=depth, sizes={"grid_pages": grid_pages})
    a, b, c = (prompt_of(31 + 8 * family, family, shared=20) for family in range(3))
    branch = 20 // (4 * grid_pages) * (4 * grid_pages)
    assert one(script, "a", a) == 0, "nothing is cached"
    assert one(script, "b", b) == 0, "the KV of 20 tokens is cached, and no state that ends there"
    stops = [int(stop) for plan in script.plans for rid, stop in zip(plan.rids, plan.seq_lens, strict=True) if rid == "b"]
    assert stops[0] == branch, f"a chunk ends where the prompts part: {stops}"
    assert one(script, "c", c) == branch
    assert one(script, "c2", c) == 47 // (4 * grid_pages) * (4 * grid_pages), "the end of a prompt is kept too, at the last grid point"


def test_the_second_sharer_of_a_prefix_whose_window_is_gone_makes_it_again() -> None:
    script = script_with("full+swa", sizes={"window_len": 5})
    a, b, c = (prompt_of(48, family, shared=24) for family in range(3))
    assert one(script, "a", a, 20) == 0
    window = script.scheduler.state.kv.cache.window
    assert window is not None
    assert script.scheduler.state.kv.cache.keeper.ensure("swa", window.allocator.pages.num_pages - 3), "all but the last window goes"
    assert [one(script, "b", b), one(script, "c", c)] == [0, 24]


def test_two_requests_go_on_from_copies_of_one_state() -> None:
    script = script_with("full+mamba", max_running=4)
    prompt = prompt_of(24)
    one(script, "first", prompt, 1)
    script.run(*(generate(f"r{i}", [*prompt, 9 + i, 7], 12, temperature=0.9, seed=i) for i in range(3)))
    script.check_all_replies()
    ops = [(op.dst, op.src) for plan in script.plans if "r0" in plan.rids for op in plan.state_ops if op.src]
    source, count = Counter(src for _, src in ops).most_common(1)[0]
    assert count == len({dst for dst, src in ops if src == source}) == 3, f"each has its own copy of slot {source}: {ops}"
    assert all(script.replies[f"r{i}"].cached_len == 24 for i in range(3))


@pytest.mark.parametrize("cache", [CacheArgs(), CacheArgs(prefix_cache=False)])
@pytest.mark.parametrize("page_size, window_len", [(1, 5), (4, 3), (4, 9), (8, 8)])
def test_a_request_that_decodes_holds_one_window_and_the_page_it_writes(page_size: int, window_len: int, cache: CacheArgs) -> None:
    script = script_with("full+swa", page_size=page_size, sizes={"window_len": window_len}, cache=cache, num_pages=128)
    script.turn(generate("r", prompt_of(30), 60))
    window = script.scheduler.state.kv.cache.window
    assert window is not None
    most = 0
    while not script.scheduler.idle:
        script.turn()
        for req in script.scheduler.state.queues.decode:
            start, stop = window.own_range(req.kv)
            most = max(most, stop - start)
    script.check_all_replies()
    assert most <= -(-window_len // page_size) + 1


@pytest.mark.parametrize("parts", ["full+swa", "full+swa+mamba"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_far_longer_than_the_window_pool_is_prefilled_in_what_fits(parts: str, depth: int) -> None:
    script = script_with(parts, sizes={"window_len": 6, "num_window_pages": 3}, depth=depth, chunked_prefill=64)
    script.run(generate("long", prompt_of(150), 20), generate("other", prompt_of(90, 1, shared=40), 20))
    script.check_all_replies()
    assert_everything_is_back(script)


def test_the_budget_that_refused_is_named_with_its_numbers() -> None:
    script = script_with("full+mamba", sizes={"num_states": 1})
    script.turn(generate("a", prompt_of(9), 30), generate("b", prompt_of(9, 1), 3))
    script.turn()
    (wait,) = script.scheduler.control.request("b")["request"]["waiting_for"]
    assert wait["reason"] == "states"
    assert wait["why"] == "b: states: needs 1, has 0; 1 state slots, one for each running request; the others are held"
    script = script_with("full+swa", sizes={"window_len": 8, "num_window_pages": 3})
    script.turn(generate("a", prompt_of(12), 30), generate("b", prompt_of(12, 1), 3))
    script.turn()
    (wait,) = script.scheduler.control.request("b")["request"]["waiting_for"]
    assert wait["reason"] == "window"
    assert wait["why"].startswith("b: window: needs 3, has ")
    script.run()
    script.check_all_replies()


@pytest.mark.parametrize("parts", OTHERS)
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_and_retraction_at_every_turn_return_every_kind_of_memory(parts: str, depth: int) -> None:
    for at in range(1, 14):
        for retract in (False, True):
            script = script_with(parts, depth=depth, chunked_prefill=16)
            script.turn(*mixed_load())
            for _ in range(at):
                script.turn()
            req = script.scheduler.state.queues.by_rid.get("r1")
            if retract and req is not None and req.phase in (Phase.PREFILL, Phase.DECODE):
                retract_req(script.scheduler.state, req)
                assert (req.kv.state_slot, req.kv.snapshots, req.kv.window_allocated_len) == (None, [], 0)
            script.run(*(() if retract else (AbortReq(rid="r1"), AbortReq(rid="r3"))))
            script.check_all_replies()
            assert_everything_is_back(script)


def test_a_request_that_shares_too_much_to_run_alone_goes_on_without_sharing() -> None:
    """One state slot: the state it would go on from is the only one there is, and stays locked while its copy is asked for."""
    script = script_with("full+mamba", sizes={"num_states": 1})
    prompt = prompt_of(24)
    assert one(script, "a", prompt) == 0
    script.run(generate("b", [*prompt, 5, 6], 4))
    script.check_all_replies()
    assert script.replies["b"].cached_len == 0


def test_preemption_counts_windows_and_states_and_leaves_locks_as_they_were() -> None:
    script = script_with("full+mamba", sizes={"num_states": 2})
    script.turn(generate("a", prompt_of(9), 30, priority=0), generate("b", prompt_of(9, 1), 30, priority=0))
    script.turn()
    script.run(generate("vip", prompt_of(9, 2), 5, priority=50))
    script.check_all_replies()
    assert script.scheduler.state.counters.preemptions == 1
    assert_everything_is_back(script)


def test_pools_in_which_nobody_could_run_are_refused_at_start() -> None:
    with pytest.raises(BadConfig, match="window pages"):
        Script(capacity={"window_len": 8, "num_window_pages": 2})
    with pytest.raises(BadConfig, match="multiple of page_size"):
        Script(capacity={"num_states": 2, "state_grid": 6})


# ---- the harness notices what it exists to notice: each of these is the code, broken once --------------------------------------------------


def broken(parts: str, **options: Any) -> None:
    script = script_with(parts, chunked_prefill=16, **options)
    for rid in ("a", "b", "c"):
        script.run(generate(rid, prompt_of(40, "abc".index(rid), shared=32), 12))
    script.check_all_replies()


def test_a_copy_that_is_missed_gives_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    take = StateAllocator.take_ops
    monkeypatch.setattr(StateAllocator, "take_ops", lambda self: tuple(op for op in take(self) if not op.src))
    with pytest.raises(AssertionError, match=r"^[abc]"):
        broken("full+mamba")


def test_a_snapshot_of_the_wrong_position_gives_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(self: RequestStates, kv: Any) -> bool:
        at = kv.kv_committed_len - 4  # the state goes on to the next page already
        if kv.kv_committed_len % 4 or at <= kv.cache_protected_len:
            return False
        kv.snapshots.append((at, self._take(kv.state_slot, EvictReason.SNAPSHOT)))
        return True

    def newest(self: RequestStates, kv: Any, limit: int, *, final: bool) -> int:
        return max((at for at, _ in kv.snapshots if at <= limit), default=0)

    monkeypatch.setattr(RequestStates, "snapshot", too_late)
    monkeypatch.setattr(RequestStates, "shareable_len", newest)
    with pytest.raises(AssertionError):
        broken("full+mamba")


def test_a_window_that_slides_too_far_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    slide = RequestWindow.slide
    monkeypatch.setattr(RequestWindow, "slide", lambda self, kv, length: slide(self, kv, length + 4))
    with pytest.raises(AssertionError, match=r"R4|window"):
        broken("full+swa")


@pytest.mark.parametrize("kind", ["out_window_loc", "state_slots", "state_ops"])
def test_a_plan_that_says_the_wrong_thing_about_windows_or_states_is_noticed(kind: str) -> None:
    script = script_with("full+swa+mamba")
    submit = script.executor.submit

    def wrong(plan: StepPlan) -> None:
        damaged = {
            "out_window_loc": lambda: replace(plan, out_window_loc=plan.out_window_loc + 4),
            "state_slots": lambda: replace(plan, state_slots=plan.state_slots + 1),
            "state_ops": lambda: replace(plan, state_ops=()),
        }
        submit(damaged[kind]())

    script.executor.submit = wrong  # type: ignore[method-assign]

    def play() -> None:
        script.run(*mixed_load())
        script.check_all_replies()

    with pytest.raises((AssertionError, IndexError)):
        play()
