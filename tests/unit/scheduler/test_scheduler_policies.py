"""The order that each policy gives, and the wait that it bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.script import Script, generate, pack, prompt_of
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Namespace, Phase
from rootlet.ipc.messages import DetokSpec, TokenizedGenerateReqInput
from rootlet.scheduler.policies import POLICIES, PolicyContext
from rootlet.scheduler.policies.base import OVERDUE_PASSES, SCORED_LIMIT
from rootlet.scheduler.policies.fairness import MAX_REMEMBERED, Tenants
from rootlet.scheduler.queue import Queues
from rootlet.scheduler.req import Req, ReqSpec, ReqTimes, Tenant


def req(rid: str, prompt: list[int] | int = 4, *, seq: int = 0, passes: int = 0, tenant: Tenant | None = None, **spec: Any) -> Req:
    ids = prompt_of(prompt) if isinstance(prompt, int) else prompt
    base = {"namespace": Namespace(), "params": SamplingParams(), "max_new": 8, "stop_ids": (), "end_ids": frozenset(), "detok": DetokSpec()}
    made = Req(
        spec=ReqSpec(rid=rid, seq=seq, **{**base, **spec}), tokens=bytearray(pack(ids)), prompt_len=len(ids), times=ReqTimes(0.0, num_passes=passes)
    )
    made.tenant = tenant or made.tenant
    return made


def context(matches: dict[str, int] | None = None, **options: Any) -> PolicyContext:
    found = matches or {}
    return PolicyContext(page_size=4, **{"cache_enabled": True, "probe": lambda r: found.get(r.rid, 0), **options})


def order(name: str, reqs: list[Req], ctx: PolicyContext | None = None) -> list[str]:
    return [r.rid for r in POLICIES.get(name)(reqs, ctx or context())]


def test_shortest_prefill_first_counts_what_is_not_cached() -> None:
    reqs = [req("long", 40), req("cached", 60, seq=1), req("short", 9, seq=2)]
    assert order("shortest-prefill-first", reqs, context({"cached": 56})) == ["cached", "short", "long"]
    aged = [req("long", 40, passes=1), *reqs[1:]]
    assert order("shortest-prefill-first", aged, context({"cached": 56}, aging_len=40)) == ["long", "cached", "short"]


def test_lof_takes_the_longest_output_first() -> None:
    reqs = [req("a", max_new=3), req("b", max_new=90, seq=1), req("c", max_new=3, seq=2, passes=2)]
    assert order("lof", reqs, context(aging_len=10)) == ["b", "c", "a"]
    assert order("lof", [req("low", max_new=90), req("high", max_new=1, priority=1)]) == ["high", "low"]


def test_hrrn_divides_the_tokens_waited_by_the_tokens_needed() -> None:
    reqs = [req("long", 40), req("short", 10, seq=1), req("new", prompt_of(10, 3), seq=2), req("hit", prompt_of(16, 5), seq=3)]
    for made, since in zip(reqs, (0, 50, 95, 99), strict=True):
        made.times.prefilled_at_arrival = since
    # 100/40 = 2.5, 50/10 = 5, 5/10 = 0.5, nothing left to compute: first.
    ctx = context({"hit": 16}, prefilled=lambda: 100)
    assert order("hrrn", reqs, ctx) == ["hit", "short", "long", "new"]


def test_dfs_weight_visits_the_heavier_subtree_first_children_before_their_parent() -> None:
    """Prefixes a (8 tokens), a.b (16), a.c (16), d (16): three wait below a, one below d; two below a.c."""
    a, d = prompt_of(8), prompt_of(16, 4)
    ab, ac = [*a, *prompt_of(8, 1)], [*a, *prompt_of(8, 2)]
    prompts = {"at d": d, "at a": a, "at ab": ab, "at ac 1": ac, "at ac 2": ac, "cold": prompt_of(12, 6)}
    reqs = [req(rid, [*ids, 5], seq=i) for i, (rid, ids) in enumerate(prompts.items())]
    matches = {"at d": 16, "at a": 8, "at ab": 16, "at ac 1": 16, "at ac 2": 16}
    assert order("dfs-weight", reqs, context(matches)) == ["at ac 1", "at ac 2", "at ab", "at a", "at d", "cold"]
    assert order("dfs-weight", reqs, context(matches, cache_enabled=False)) == list(prompts)


def naive_dfs(reqs: list[Req], matches: dict[str, int], page: int) -> list[str]:
    """By definition, on a tree with one node a page."""
    tree: dict[Any, Any] = {}
    for r in reqs:
        data = bytes(r.tokens)
        path = [data[4 * i : 4 * (i + page)] for i in range(0, matches[r.rid], page)]
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        node.setdefault("reqs", []).append(r)

    def walk(node: dict[Any, Any]) -> tuple[int, int, list[str]]:
        own = node.get("reqs", [])
        below = sorted((walk(child) for key, child in node.items() if key != "reqs"), key=lambda w: (-w[0], w[1]))
        first = min([r.spec.seq for r in own] + [w[1] for w in below], default=0)
        return len(own) + sum(w[0] for w in below), first, [rid for w in below for rid in w[2]] + [r.rid for r in own]

    return walk(tree)[2]


@pytest.mark.parametrize("seed", range(20))
def test_dfs_weight_equals_its_definition_on_random_queues(seed: int) -> None:
    rng = random.Random(seed)
    reqs, matches = [], {}
    for i in range(30):
        ids = [rng.randrange(5, 7) for _ in range(24)]
        reqs.append(req(f"r{i}", ids, seq=i))
        matches[f"r{i}"] = rng.randrange(0, 7) * 4
    assert order("dfs-weight", reqs, context(matches)) == naive_dfs(reqs, matches, 4)


@pytest.mark.parametrize("policy", ["dfs-weight", "shortest-prefill-first"])
def test_a_long_queue_is_scored_at_its_head_only(policy: str) -> None:
    asked: list[str] = []
    reqs = [req(f"{i:04}", seq=i) for i in range(SCORED_LIMIT + 50)]
    ctx = context(probe=lambda r: asked.append(r.rid) or (4 if int(r.rid) >= SCORED_LIMIT - 1 else 0))
    got = order(policy, reqs, ctx)
    assert len(asked) == SCORED_LIMIT
    assert got[0] == f"{SCORED_LIMIT - 1:04}"
    assert got[SCORED_LIMIT:] == [r.rid for r in reqs[SCORED_LIMIT:]]


def test_random_is_seeded() -> None:
    reqs = [req(f"{i:02}", seq=i) for i in range(20)]
    ctx, again = context(), context()
    first = order("random", reqs, ctx)
    assert first != sorted(first)
    assert first == order("random", reqs, again)
    assert order("random", reqs, ctx) != first


def test_routing_key_follows_the_running_majority_and_leaves_the_queue_alone_without_one() -> None:
    queues = Queues()
    reqs = [req(str(i), seq=i, routing_key=key) for i, key in enumerate((None, "z", "b", "a", "b"))]
    assert order("routing-key", reqs, context(queues=queues)) == ["0", "1", "2", "3", "4"]
    for i, key in enumerate(("b", "b", "a", None)):
        running = req(f"run{i}", seq=i, routing_key=key)
        running.phase = Phase.DECODE
        queues.add(running)
    assert order("routing-key", reqs, context(queues=queues)) == ["2", "4", "3", "0", "1"]


def test_vtc_takes_turns_by_what_tenants_were_served() -> None:
    rich, poor = Tenant("rich", served=100), Tenant("poor", served=60)
    reqs = [req(f"r{i}", prompt_of(30, i), seq=i, tenant=rich) for i in range(3)]
    reqs += [req(f"p{i}", prompt_of(30, 5 + i), seq=5 + i, tenant=poor) for i in range(3)]
    assert order("vtc", reqs) == ["p0", "p1", "r0", "p2", "r1", "r2"]
    assert order("vtc", reqs, context({"p2": 28}))[0] == "p2"  # inside a tenant as lpm


def test_tenants_start_level_and_debts_are_remembered() -> None:
    tenants = Tenants.empty()
    flood = tenants.enter("flood")
    flood.served = 500
    late = tenants.enter("late")
    assert late.served == 500  # nobody saves up credit while away
    late.served += 200
    tenants.leave(late)
    assert tenants.enter("late").served == 700  # nor leaves a debt behind
    for i in range(3 * MAX_REMEMBERED):
        tenants.leave(tenants.enter(f"t{i}"))
    assert len(tenants.served()) <= MAX_REMEMBERED + 2
    tenants.leave(late)
    tenants.leave(flood)
    assert tenants.served() == {}


def test_a_tenant_is_charged_for_computed_prompt_tokens_and_drawn_ones_once() -> None:
    script = Script(retract_every=3, page_size=4)
    others = generate("stays", prompt_of(4, 9), 60, user="other")  # so that the accounts stay open
    script.turn(others, generate("a", prompt_of(20), 10, user="u"))
    while not script.replies.get("a") or not script.replies["a"].terminals:
        script.turn()
    assert script.scheduler.state.tenants.served()["u"] == 20 + 2 * 10  # what retractions computed again is free
    assert script.scheduler.state.counters.retractions > 0
    script.turn(generate("b", prompt_of(20), 1, user="u"))
    while not script.replies.get("b"):
        script.turn()
    assert script.scheduler.state.tenants.served()["u"] >= 40 + (20 - script.replies["b"].cached_len) + 2
    script.run()
    script.check_all_replies()


def test_under_shortest_prefill_first_a_long_chunk_leaves_room_for_shorter_prompts() -> None:
    first_tokens = {}
    for policy in ("fcfs", "shortest-prefill-first"):
        script = Script(schedule_policy=policy, chunked_prefill=32, page_size=4)
        script.turn(generate("long", prompt_of(200), 2))
        script.turn(generate("short", prompt_of(9, 3), 1))
        first_tokens[policy] = "short" in script.replies
        assert [(p.rids, p.extend_lens.tolist()) for p in script.plans[1:]] == [
            (("long",), [32]) if policy == "fcfs" else (("long", "short"), [20, 9])
        ]
        script.run()
        script.check_all_replies()
    assert first_tokens == {"fcfs": False, "shortest-prefill-first": True}


def test_a_chunk_always_gets_a_page_however_many_shorter_ones_wait() -> None:
    script = Script(schedule_policy="shortest-prefill-first", chunked_prefill=32, page_size=4, max_running=2)
    script.turn(generate("long", prompt_of(64), 2))
    script.turn(*(generate(f"s{i}", prompt_of(20, 1 + i), 40) for i in range(30)))
    while "long" not in script.replies:
        script.turn()
    assert all(p.extend_lens[p.rids.index("long")] >= 4 for p in script.plans if "long" in p.rids and p.mode.name == "EXTEND")
    script.run()
    script.check_all_replies()


def test_a_hopeless_queue_is_not_sorted_again_in_each_step() -> None:
    script = Script(schedule_policy="shortest-prefill-first", num_pages=24, page_size=4, conservativeness=10.0)
    probes: list[str] = []
    context = script.scheduler._prefill._context
    object.__setattr__(context, "probe", lambda r: probes.append(r.rid) or 0)
    script.turn(generate("runs", prompt_of(20), 60))
    script.turn(*(generate(f"w{i}", prompt_of(20, 1 + i), 60) for i in range(5)))
    script.turn()
    probes.clear()
    for _ in range(10):
        script.turn()
    assert probes == []  # the same head is refused each time
    script.turn(generate("new", prompt_of(8, 9), 1))
    assert len(probes) == 6  # until somebody comes
    script.run()
    script.check_all_replies()


# ---- waits are bounded: one victim against an endless stream that the policy prefers --------------------------------------------------------

HOT = prompt_of(64)


def stream(policy: str) -> Iterator[TokenizedGenerateReqInput]:
    """Requests that the policy likes better than the victim."""
    for i in range(100_000):
        tail = [5 + i % 50, 5 + i // 50 % 50, 5 + i // 2500 % 50]
        match policy:
            case "shortest-prefill-first" | "hrrn":
                yield generate(f"s{i}", tail, 1)
            case "lof":
                yield generate(f"s{i}", tail, 6)
            case "routing-key":
                yield generate(f"s{i}", tail, 3, routing_key="hot")
            case "vtc":
                yield generate(f"s{i}", [*HOT, *tail], 2, user="flood")
            case _:
                yield generate(f"s{i}", [*HOT, *tail], 2)


def overtaken_by(policy: str, *, aging: int, turns: int, max_running: int = 2, **victim: Any) -> int:
    """How many of the stream were admitted after the victim came, until it was; the stream keeps two of its own waiting."""
    script = Script(schedule_policy=policy, max_running=max_running, num_pages=512, aging=aging, page_size=4)
    source = stream(policy)
    state = script.scheduler.state
    script.run(next(source))
    for _ in range(3):
        script.turn(next(source), next(source))
    script.turn(next(source), next(source), generate("victim", **{"prompt": prompt_of(60, 9), "max_new": 1, **victim}))
    before = {rid for rid in script.sent if script.replies.get(rid)} | {r.rid for r in state.queues.holders()}
    for _ in range(turns):
        script.turn(*(next(source) for _ in range(max(0, 3 - len(state.queues.waiting)))))
        if state.queues.by_rid.get("victim") not in state.queues.waiting:
            break
    else:
        return turns
    return len({rid for rid in script.sent if script.replies.get(rid)} - before)


BOUNDS = [
    # policy, aging, victim, most requests that may overtake it. A pass admits at most two here, since two rows are free at best.
    ("fcfs", 0, {}, 6),  # those who were waiting before it
    ("lpm", 16, {}, 2 * (64 // 16 + 1) + 6),
    ("dfs-weight", 1, {}, 2 * (OVERDUE_PASSES + 1) + 6),
    ("shortest-prefill-first", 10, {}, 2 * (60 // 10 + 1) + 6),
    ("lof", 1, {}, 2 * (6 + 1) + 6),
    ("random", 1, {}, 2 * (OVERDUE_PASSES + 1) + 6),
    ("routing-key", 1, {}, 2 * (OVERDUE_PASSES + 1) + 6),
    ("hrrn", 0, {}, 60 // 3 + 6),  # one token of theirs counts as much as 60/3 of its own
    ("vtc", 0, {"user": "late"}, 2 + 2),  # the rows in use, and one turn
]


@pytest.mark.parametrize("policy, aging, victim, bound", BOUNDS, ids=[b[0] for b in BOUNDS])
def test_nobody_starves(policy: str, aging: int, victim: dict[str, Any], bound: int) -> None:
    assert overtaken_by(policy, aging=aging, turns=1500, **victim) <= bound


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "shortest-prefill-first", "lof"])
def test_without_aging_the_same_stream_starves_the_same_victim(policy: str) -> None:
    """So the bounds above are the aging's doing."""
    assert overtaken_by(policy, aging=0, turns=400) == 400


def test_a_flooding_tenant_delays_the_other_by_rows_not_by_its_flood() -> None:
    """One sends 60 requests, then another sends one: under fcfs it waits for all of them, under vtc for a row."""
    waits = {}
    for policy in ("fcfs", "vtc"):
        script = Script(schedule_policy=policy, max_running=4, num_pages=512)
        script.turn(*(generate(f"f{i}", prompt_of(12, i), 8, user="flood") for i in range(60)))
        for _ in range(3):
            script.turn()
        script.turn(generate("one", prompt_of(12, 99), 8, user="other"))
        turns = 0
        while not script.replies.get("one"):
            script.turn()
            turns += 1
        waits[policy] = turns
        script.run()
        script.check_all_replies()
    assert waits["vtc"] <= 10
    assert waits["fcfs"] > 100
