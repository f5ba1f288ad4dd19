"""What went wrong in other schedulers (scheduler.md, section 4), one test a row that applies here; the row's name is in the test's.

B5, B6, B7, B8, D9 and E2..E5 belong to sessions, health probes, several frontends, ranks, grammars and the detokenizer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fixtures.script import EOS, VOCAB, LogprobSpec, Script, generate, prompt_of
from rootlet.config.schema import CacheArgs
from rootlet.core.errors import BadConfig
from rootlet.core.types import FinishKind, Phase
from rootlet.ipc.messages import AbortReq, StopReq
from rootlet.scheduler.req import Req
from rootlet.scheduler.state import retract_req

PAGE_SIZES = [1, 2, 4, 16]
DEPTHS = [1, 2, 3]


def test_a1_prefill_only_requests_do_not_latch_the_batch_full() -> None:
    script = Script(max_running=2).run(*(generate(f"r{i}", prompt_of(9, i), 0) for i in range(5)))
    script.check_all_replies()
    assert all(r.tokens == [] and r.finish.kind is FinishKind.LENGTH for r in script.replies.values())


def test_a2_four_cold_prompts_and_four_rows_run_within_a_few_ticks() -> None:
    script = Script(max_running=4, chunked_prefill=16)
    script.turn(*(generate(f"r{i}", prompt_of(20, i), 40) for i in range(4)))
    for _ in range(6):
        script.turn()
    assert len(script.scheduler.state.queues.decode) == 4


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_new", [1, 2, 17, None])
def test_a3_every_prompt_length_around_capacity_is_refused_or_finishes(page_size: int, depth: int, max_new: int | None) -> None:
    """Also bug reports 40 and 41: small requests queued behind are served either way."""
    pool = 8 * page_size
    for length in sorted({max(pool + d, 1) for d in (-2 * page_size, -page_size - 1, -page_size, 1 - page_size, -2, -1, 0, 1, 2)}):
        script = Script(page_size=page_size, num_pages=8, depth=depth, chunked_prefill=16)
        script.run(generate("big", prompt_of(length), max_new), generate("small", prompt_of(1, 1), 2))
        script.check_all_replies()
        finish = script.replies["big"].finish
        if length > pool:
            assert (finish.kind, finish.status, finish.code) == (FinishKind.ERROR, 400, "kv_pool_exceeded")
            assert str(length) in (finish.message or "")
            assert str(pool) in (finish.message or "")
            assert "--max-total-tokens" in (finish.message or "")
        else:
            assert finish.kind is FinishKind.LENGTH
            assert len(script.replies["big"].tokens) == min(max_new or 10**6, pool - length + 1)
        assert script.replies["small"].finish.kind is FinishKind.LENGTH


def test_a6_counters_equal_table_sizes_each_tick() -> None:
    script = Script(num_pages=16, retract_every=2)
    script.turn(*(generate(f"r{i}", prompt_of(9, i), 12) for i in range(5)))
    while not script.scheduler.idle:
        gauges = script.scheduler.control.metrics()["gauges"]
        queues = script.scheduler.state.queues
        assert gauges["running"] + gauges["waiting"] + gauges["gated"] == len(queues.by_rid)
        assert gauges["running"] == script.scheduler.state.kv.req_to_token.num_held >= 0
        script.turn()


def test_a7_chunked_prompt_with_one_row() -> None:
    script = Script(max_running=1, chunked_prefill=16).run(generate("a", prompt_of(100), 3), generate("b", prompt_of(50, 1), 3))
    script.check_all_replies()


def test_a8_newcomer_beside_a_hog_and_a_parked_request_waits_boundedly() -> None:
    script = Script(num_pages=16, max_running=8, conservativeness=0.2)
    script.turn(generate("hog", prompt_of(10), 40), generate("parked", prompt_of(40, 1), 1))
    script.turn(generate("new", prompt_of(3, 2), 1))
    script.run(limit=120)
    script.check_all_replies()


def test_a9_lpm_ages_so_that_a_cold_request_overtakes_a_hot_stream() -> None:
    script = Script(schedule_policy="lpm", max_running=1, num_pages=256)
    hot = prompt_of(3 * 64)
    script.run(generate("seed", hot, 1))
    script.turn(generate("cold", prompt_of(60, 7), 1))
    done_before = 0
    for i in range(40):
        script.turn(generate(f"hot{i}", [*hot, 5 + i], 1))
        if not script.replies.get("cold"):
            done_before += 1
    script.run()
    script.check_all_replies()
    assert done_before <= 8


@pytest.mark.parametrize("depth", DEPTHS)
def test_b1_aborted_at_every_tick_the_engine_is_idle_within_two(depth: int) -> None:
    for when in range(14):
        script = Script(depth=depth, chunked_prefill=8)
        script.turn(generate("r", prompt_of(30), 1000))
        for _ in range(when):
            script.turn()
        script.turn(AbortReq(rid="r"))
        turns = 0
        while not script.scheduler.idle:
            script.turn()
            turns += 1
        assert turns <= 2
        assert script.replies["r"].finish.kind is FinishKind.ABORT
        script.check_all_replies()


def test_b2_abort_all_reaches_every_container() -> None:
    script = Script(max_running=2, chunked_prefill=8, depth=2)
    script.turn(generate("running", prompt_of(5), 100))
    script.turn()
    script.turn()
    chunked, waiting = generate("chunked", prompt_of(60, 1), 5), generate("waiting", prompt_of(9, 2), 5)
    script.turn(chunked, waiting, generate("gated", prompt_of(60, 1), 5, parent_rid="chunked"))
    queues = script.scheduler.state.queues
    assert [len(queues.container(p)) for p in (Phase.GATED, Phase.WAITING, Phase.PREFILL, Phase.DECODE)] == [1, 1, 1, 1]
    script.run(AbortReq(abort_all=True, reason="the operator said so"))
    script.check_all_replies()
    assert {r.finish.message for r in script.replies.values()} == {"the operator said so"}


def test_b3_rids_match_exactly() -> None:
    script = Script()
    script.turn(generate("batch_1", prompt_of(5), 9), generate("batch_10", prompt_of(6), 9))
    script.run(AbortReq(rid="batch_1"), AbortReq(rid=""), AbortReq(rid="unknown"))
    assert script.replies["batch_1"].finish.kind is FinishKind.ABORT
    assert script.replies["batch_10"].finish.kind is FinishKind.LENGTH


@pytest.mark.parametrize("depth", DEPTHS)
def test_b4_rows_and_pages_of_an_aborted_request_are_safe_while_its_plan_is_in_flight(depth: int) -> None:
    """The late executor reads at collect; freed pages are poisoned and handed to a newcomer at once."""
    for when in range(1, 10):
        script = Script(depth=depth, mode="late", num_pages=8, max_running=2)
        script.turn(generate("a", prompt_of(20), 9), generate("b", prompt_of(5, 1), 9))
        for _ in range(when):
            script.turn()
        script.run(AbortReq(rid="a"), generate("c", prompt_of(21, 2), 5))
        script.check_all_replies()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_c1_the_last_request_that_does_not_fit_ends_by_length_and_the_server_lives(page_size: int, depth: int) -> None:
    """Intake's clamp makes this impossible, so it is taken off: bug report 43."""
    script = Script(page_size=page_size, num_pages=8, depth=depth, capacity={"max_context_len": 16 * 16})
    script.turn(generate("r", prompt_of(page_size), 2, ignore_eos=True))
    req = script.scheduler.state.queues.by_rid["r"]
    object.__setattr__(req.spec, "max_new", 10_000)
    script.scheduler.state.limits = _unlimited(script)
    script.run()
    assert script.replies["r"].finish.kind is FinishKind.LENGTH
    assert len(script.replies["r"].tokens) == 7 * page_size + 1
    script.run(generate("next", prompt_of(3, 1), 2))
    assert script.replies["next"].finish.kind is FinishKind.LENGTH


def _unlimited(script: Script):
    """Limits under which I9 does not object to the request that was tampered with."""
    return replace(script.scheduler.state.limits, num_pages=10**6, max_context_len=10**7)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_c2_c3_c4_retraction_storm(page_size: int, depth: int) -> None:
    """Bug report 44: pages are counted, not tokens; conservation after each retraction (check=True)."""
    script = Script(page_size=page_size, num_pages=24 * 4 // page_size, depth=depth, conservativeness=0.05, max_running=8)
    msgs = [generate(f"r{i}", prompt_of(6 + i, i), 40, ignore_eos=i % 2 == 0, logprobs=LogprobSpec(top_n=1)) for i in range(8)]
    script.run(*msgs)
    script.check_all_replies()
    assert script.scheduler.state.counters.retractions > 0


def test_c5_outputs_survive_a_retraction() -> None:
    script = Script(retract_every=2, depth=2).run(generate("r", prompt_of(6), 20, temperature=1.0, frequency_penalty=1.5))
    script.check_all_replies()
    assert script.log[0]["num_retractions"] > 2


def test_c8_results_of_an_older_epoch_are_dropped_exactly_once() -> None:
    script = Script(retract_every=1, depth=3).run(generate("r", prompt_of(6), 12))
    script.check_all_replies()
    assert script.scheduler.state.counters.discarded_rows > 0


@pytest.mark.parametrize("depth", [2, 3])
def test_d1_d6_rewritten_rows_do_not_disturb_a_late_reader(depth: int) -> None:
    """Equal prompts at once: each finishes its prefill and is pointed at the tree's pages while its next step is in flight."""
    script = Script(depth=depth, mode="late", max_running=8).run(*(generate(f"r{i}", prompt_of(18), 6, choice_index=i) for i in range(6)))
    script.check_all_replies()
    assert script.scheduler.state.kv.cache.stats()["duplicate_pages"] > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_d2_relay_survives_many_prefills_between_decode_steps(depth: int) -> None:
    """Bug report 45."""
    script = Script(depth=depth, max_running=4, num_pages=256)
    script.turn(generate("long0", prompt_of(7), 60), generate("long1", prompt_of(9, 1), 60))
    for i in range(60):
        script.turn(generate(f"s{i}", prompt_of(3 + i % 11, i % 5), 1 + i % 3))
    script.run()
    script.check_all_replies()


def test_d3_chunks_do_not_draw() -> None:
    script = Script(chunked_prefill=8, depth=2).run(generate("r", prompt_of(30), 3))
    script.check_all_replies()
    assert [bool(p.sample[0]) for p in script.plans[:4]] == [False, False, False, True]


def test_d5_the_tree_keeps_its_own_copy_of_a_prefix() -> None:
    script = Script().run(generate("a", prompt_of(12), 1))
    table = script.scheduler.state.kv.req_to_token.table
    table[:] = 0  # rows of nobody
    script.run(generate("b", prompt_of(16), 2))
    assert script.replies["b"].cached_len == 12
    script.check_all_replies()


@pytest.mark.parametrize("depth", DEPTHS)
def test_d7_chunks_leak_no_lock_when_cut_off_at_every_point(depth: int) -> None:
    for when in range(8):
        script = Script(depth=depth, chunked_prefill=8)
        script.turn(generate("a", prompt_of(60), 4), generate("b", prompt_of(60), 4))
        for _ in range(when):
            script.turn()
        script.run(AbortReq(rid="a"))
        script.check_all_replies()
        assert script.scheduler.state.kv.cache.stats()["locks"] == 0


def test_e1_a_stop_beats_length_and_nothing_follows_it() -> None:
    script = Script(eos_rate=1.0)
    late = generate("min", prompt_of(5), 9, min_new_tokens=4)
    script.run(generate("stop", prompt_of(5), 1), generate("ignored", prompt_of(5), 4, ignore_eos=True), late)
    script.check_all_replies()
    assert (script.replies["stop"].finish.kind, script.replies["stop"].finish.matched) == (FinishKind.STOP, EOS)
    assert script.replies["ignored"].tokens == [EOS] * 4
    assert len(script.replies["min"].tokens) == 5
    assert EOS not in script.replies["min"].tokens[:4]


@pytest.mark.parametrize("chunk", [16, 20, 0])
def test_e6_logprobs_across_chunk_edges(chunk: int) -> None:
    for start in (0, 1, 15, 16, 17, 39, 40):
        spec = LogprobSpec(top_n=3, prompt_start=start)
        script = Script(chunked_prefill=chunk, depth=2, retract_every=2)
        script.run(generate("warm", prompt_of(40), 1))
        plain = generate("b", prompt_of(33, 1), 4)
        script.run(generate("a", prompt_of(40), 4, logprobs=spec), plain, generate("c", prompt_of(40), 4, logprobs=LogprobSpec()))
        script.check_all_replies()
        assert len(script.replies["a"].prompt_logprobs[0]) == 40 - start


def test_e7_penalties_count_each_output_once() -> None:
    """Closed form in the reference; overlap and retraction must not count a token twice or lag behind."""
    for depth in DEPTHS:
        options = {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5}
        Script(depth=depth, retract_every=3).run(generate("r", prompt_of(6), 30, **options)).check_all_replies()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_f1_a_retracted_request_hits_its_own_pages_and_goes_on(page_size: int) -> None:
    """Bug report 55: also prompts that are exact multiples of a page."""
    for length in (page_size, 2 * page_size, 2 * page_size + 1):
        script = Script(page_size=page_size, retract_every=2, num_pages=64).run(generate("r", prompt_of(length), 3 * page_size + 2))
        script.check_all_replies()


def test_f2_a_prompt_that_fills_the_pool() -> None:
    script = Script(num_pages=8).run(generate("r", prompt_of(32), 5))
    script.check_all_replies()
    assert len(script.replies["r"].tokens) == 1


def test_f4_many_tiny_prompts_on_large_pages() -> None:
    script = Script(page_size=64, num_pages=8, max_running=8, capacity={"max_rows": 32}, chunked_prefill=64)
    script.run(*(generate(f"r{i}", prompt_of(1, i), 3) for i in range(30)))
    script.check_all_replies()


def test_f5_recomputation_after_a_retraction_is_not_a_hit() -> None:
    script = Script(retract_every=2).run(generate("r", prompt_of(30), 20))
    counters = script.scheduler.state.counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (30, 0)
    assert script.replies["r"].cached_len == 0
    assert counters.retractions > 0


def test_f6_chunks_make_progress_without_a_cache() -> None:
    script = Script(cache=CacheArgs(prefix_cache=False), chunked_prefill=8).run(generate("r", prompt_of(100), 3))
    script.check_all_replies()
    assert len(script.plans) == 13 + 2


def test_f7_every_submitted_rid_gets_exactly_one_terminal_message() -> None:
    script = Script(num_pages=8, max_queue=3, max_running=1)
    bad = [
        generate("empty", [], 3),
        generate("pool", prompt_of(33), 3),
        generate("context", prompt_of(5000), 3),
        generate("vocab", [1, 64], 3),
        generate("negative", [-1], 3),
        generate("torn", [], 3, input_ids=b"abc"),
    ]
    script.turn(*bad)
    script.run(*(generate(f"r{i}", prompt_of(4, i), 2) for i in range(8)))
    script.check_all_replies()
    assert {script.replies[m.rid].finish.status for m in bad} == {400}
    assert sum(r.finish.code == "queue_full" for r in script.replies.values()) == 8 - (1 + 3)


def test_duplicate_rid_does_not_end_the_first_one() -> None:
    script = Script()
    script.run(generate("r", prompt_of(5), 4), generate("r", prompt_of(9, 2), 4))
    script.check_all_replies()
    assert script.scheduler.state.counters.duplicate_rids == 1


def test_a_rid_may_come_back_while_the_overshoot_of_its_first_life_is_in_flight() -> None:
    script = Script(depth=3, eos_rate=1.0)
    script.turn(generate("r", prompt_of(5), 50))
    while not script.replies.get("r"):
        script.turn()
    assert script.scheduler.num_in_flight
    first = script.replies.pop("r")
    assert first.finish.kind is FinishKind.STOP
    script.run(generate("r", prompt_of(5), 50))
    assert script.replies["r"].tokens == first.tokens


def test_chunk_smaller_than_a_page_is_refused_at_start() -> None:
    with pytest.raises(BadConfig, match="--chunked-prefill 8 is less than --page-size 16"):
        Script(page_size=16, chunked_prefill=8)


def test_failing_step_fails_only_its_request() -> None:
    for depth in DEPTHS:
        for when in range(6):
            script = Script(depth=depth, chunked_prefill=8)
            script.turn(*(generate(f"r{i}", prompt_of(20, i), 6) for i in range(3)))
            for _ in range(when):
                script.turn()
            script.executor.fail("r1")
            script.run()
            script.check_all_replies()
            assert script.replies["r1"].finish.status == 500
            assert script.replies["r0"].finish.kind is script.replies["r2"].finish.kind is FinishKind.LENGTH


@pytest.mark.parametrize("depth", DEPTHS)
def test_stop_string_keeps_nothing_past_the_stop_in_the_tree(depth: int) -> None:
    script = Script(page_size=1, num_pages=64, depth=depth)
    script.turn(generate("r", prompt_of(5), 30))
    while len(script.replies.get("r", _Empty).tokens) < 9:
        script.turn()
    again, unknown = StopReq(rid="r", keep_len=1, matched="y"), StopReq(rid="gone", keep_len=0, matched="z")
    script.run(StopReq(rid="r", keep_len=4, matched="x"), again, unknown)
    script.check_all_replies()
    assert script.replies["r"].finish.matched == "x"
    ledger = script.scheduler.state.kv.ledger()
    assert ledger["evictable"] == 5 + 4


def test_stop_string_found_while_a_retracted_request_computes_its_outputs_again() -> None:
    """Only what is planned may be published: less than the stop leaves of the outputs."""
    script = Script(page_size=1, num_pages=64, chunked_prefill=8)
    script.turn(generate("r", prompt_of(5), 40))
    while len(script.replies.get("r", _Empty).tokens) < 20:
        script.turn()
    state = script.scheduler.state
    retract_req(state, state.queues.by_rid["r"])
    script.turn()
    assert state.queues.prefill[0].planned < 5 + 15
    script.run(StopReq(rid="r", keep_len=15, matched="x"))
    script.check_all_replies()


class _Empty:
    tokens: tuple[int, ...] = ()


def test_priority_goes_first_and_equal_priority_by_arrival() -> None:
    script = Script(max_running=1)
    script.turn(generate("first", prompt_of(4), 6))
    low, high = generate("low", prompt_of(4, 1), 1, priority=-1), generate("high", prompt_of(4, 3), 1, priority=5)
    script.run(low, generate("mid", prompt_of(4, 2), 1), high)
    assert [entry["rid"] for entry in script.log] == ["first", "high", "mid", "low"]


def test_retracted_requests_keep_their_place() -> None:
    script = Script(max_running=2, num_pages=32)
    script.turn(generate("a", prompt_of(4), 20), generate("b", prompt_of(4, 1), 20), generate("c", prompt_of(4, 2), 20))
    script.turn()
    order = [r.rid for r in _retract_last(script)]
    assert order == ["b", "c"]


def _retract_last(script: Script) -> list[Req]:
    state = script.scheduler.state
    retract_req(state, state.queues.by_rid["b"])
    return list(state.queues.waiting)


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({"allowed_token_ids": (EOS,), "min_new_tokens": 1}, True),
        ({"allowed_token_ids": (5, EOS), "stop_token_ids": (5,), "min_new_tokens": 2}, True),
        ({"stop_token_ids": tuple(range(VOCAB)), "min_new_tokens": 1}, True),
        ({"stop_token_ids": tuple(range(VOCAB))}, False),
        ({"allowed_token_ids": (EOS,)}, False),
        ({"allowed_token_ids": (5, EOS), "min_new_tokens": 1}, False),
        ({"stop_token_ids": tuple(i for i in range(VOCAB) if i != 7), "min_new_tokens": 1}, False),
    ],
)
def test_min_tokens_that_leave_nothing_to_draw_are_the_clients_fault(options: dict[str, Any], is_refused: bool) -> None:
    script = Script().run(generate("a", prompt_of(9), 4, **options))
    finish = script.replies["a"].finish
    assert (finish.status, finish.code) == ((400, "invalid_value") if is_refused else (200, None))
    if is_refused:
        assert "min_tokens" in str(finish.message)
