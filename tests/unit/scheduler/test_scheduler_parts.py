"""The pure parts alone: budget, adder, policies, in-batch prefixes, retraction order, gates, queues."""

from __future__ import annotations

import pytest

from fixtures.script import VOCAB, LogprobSpec, Script, generate, pack, prompt_of
from rootlet.cache.types import RadixKey
from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.errors import BadConfig
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import Capacity
from rootlet.core.types import Finish, FinishKind, Namespace, Phase
from rootlet.ipc.messages import DetokSpec
from rootlet.scheduler.budget import NewTokenRatio, Room, limits_of, pages_to_finish, prefill_budget, reserved_pages
from rootlet.scheduler.commit import check_finish
from rootlet.scheduler.gates.base import GateKeeper
from rootlet.scheduler.gates.parallel import ParallelGate
from rootlet.scheduler.in_batch_prefix import InBatchPrefix
from rootlet.scheduler.policies import POLICIES, PolicyContext
from rootlet.scheduler.policies.base import MATCHED_QUEUE_LIMIT
from rootlet.scheduler.prefill_adder import Admitted, PrefillAdder, Refused
from rootlet.scheduler.queue import Queues
from rootlet.scheduler.req import Req, ReqSpec, ReqTimes
from rootlet.scheduler.retraction import keep_order, retract_decode


def req(
    rid: str, *, prompt: list[int] | int = 4, seq: int = 0, max_new: int = 8, outputs: int = 0, ignore_eos: bool = False, priority: int = 0
) -> Req:
    ids = prompt_of(prompt) if isinstance(prompt, int) else prompt
    spec = ReqSpec(
        rid=rid,
        seq=seq,
        namespace=Namespace(),
        params=SamplingParams(ignore_eos=ignore_eos),
        max_new=max_new,
        stop_ids=(),
        end_ids=frozenset(),
        detok=DetokSpec(),
        priority=priority,
    )
    made = Req(spec=spec, tokens=bytearray(pack(ids)), prompt_len=len(ids), times=ReqTimes(arrival_s=0.0))
    for i in range(outputs):
        made.append(5 + i)
    return made


def capacity(**fields: int) -> Capacity:
    base = {"num_pages": 8, "page_size": 4, "max_rows": 8, "max_context_len": 64, "max_step_tokens": 64, "vocab_size": VOCAB}
    return Capacity(**{**base, **fields})


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("context", [10, 33, 10_000])
def test_clamp_is_the_largest_output_that_admission_accepts(page_size: int, context: int) -> None:
    limits = limits_of(capacity(page_size=page_size, max_context_len=context), SchedulerArgs())
    for prompt_len in range(1, limits.max_prompt_len + 1):
        room = limits.clamp_max_new(prompt_len, None)
        assert room >= 1
        assert pages_to_finish(prompt_len, room, page_size) <= limits.num_pages
        one_more_fits = pages_to_finish(prompt_len, room + 1, page_size) <= limits.num_pages and prompt_len + room + 1 <= context
        assert not one_more_fits
        assert limits.clamp_max_new(prompt_len, 0) == 0
        assert limits.clamp_max_new(prompt_len, room + 5) == room


@pytest.mark.parametrize("known, new, pages", [(4, 0, 1), (4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3), (1, 1, 1)])
def test_pages_to_finish(known: int, new: int, pages: int) -> None:
    assert pages_to_finish(known, new, 4) == pages


def test_a_step_smaller_than_a_page_is_refused_at_start() -> None:
    with pytest.raises(BadConfig, match="--page-size 16"):
        limits_of(capacity(page_size=16, max_step_tokens=8), SchedulerArgs())


def test_new_token_ratio_falls_rises_and_resets() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == pytest.approx(0.7)
    for _ in range(1000):
        ratio.decay()
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.after_retraction([req("a", max_new=100, outputs=30), req("b", max_new=50, outputs=10)])
    assert ratio.value == pytest.approx((40 + 20 * 2) / (150 + 1))
    ratio.after_retraction([])
    assert ratio.value == 0.0
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)
    assert NewTokenRatio(10.0).value == 1.0


def test_reserved_pages_scale_with_the_ratio() -> None:
    running = req("a", prompt=8, max_new=40)
    running.kv.kv_allocated_len = 8
    assert reserved_pages(running, 0.5, 4) == 5
    stubborn = req("b", prompt=8, max_new=40, ignore_eos=True)  # ends by length for certain, but not all running ones end at the same moment
    stubborn.kv.kv_allocated_len = 8
    assert reserved_pages(stubborn, 0.5, 4) == 5
    huge = req("c", prompt=8, max_new=100_000, ignore_eos=True)
    huge.kv.kv_allocated_len = 8
    assert reserved_pages(huge, 1.0, 4) == 1024


def adder_of(script: Script, **spent: int) -> PrefillAdder:
    state = script.scheduler.state
    budget = prefill_budget(state.limits, state.queues.holders(), ratio=1.0, num_mixed=0, mixed=Room(0, 0, 0))
    for name, value in spent.items():
        setattr(budget, name, value)
    return PrefillAdder(state.limits, state.kv, state.queues, budget)


def waiting(script: Script, made: Req) -> Req:
    script.scheduler.state.queues.add(made)
    return made


@pytest.mark.parametrize(
    "spent, why",
    [
        ({"num_rows": 0}, "rows: needs 1, has 0; --max-running is 8"),
        ({"reserved_pages": 62}, "pages: needs 3, has 2; 62 pages are reserved for what runs"),
        ({"chunk_len": 3}, "chunk: needs 4, has 3; a chunk is at least one page"),
        ({"chunk_len": 0}, "chunk: needs 1, has 0; --chunked-prefill tokens are in this step"),
    ],
)
def test_a_refusal_names_the_budget_and_its_numbers_and_changes_nothing(spent: dict[str, int], why: str) -> None:
    script = Script()
    candidate = waiting(script, req("r", prompt=9, max_new=4))
    verdict = adder_of(script, **spent).add_one_req(candidate)
    assert isinstance(verdict, Refused)
    assert verdict.why() == why
    assert candidate.phase is Phase.WAITING
    assert candidate.kv.row is None
    assert script.scheduler.state.kv.cache.stats()["locks"] == 0


def test_the_page_budget_is_read_under_the_lock_on_the_prefix() -> None:
    """16 cached pages are evictable until the candidate itself locks them: then only the rest counts, against the rest of its need."""
    script = Script(num_pages=16).run(generate("a", prompt_of(64), 1))
    candidate = waiting(script, req("r", prompt=64, max_new=1))
    assert isinstance(adder_of(script).add_one_req(candidate), Admitted)
    assert candidate.kv.cache_protected_len == 60
    other = waiting(script, req("s", prompt=prompt_of(9, 3)))
    verdict = adder_of(script).add_one_req(other)
    assert isinstance(verdict, Refused)
    assert (verdict.term, verdict.have) == ("pages", 0)


def test_chunks_end_on_page_edges_and_only_one_request_is_left_unfinished() -> None:
    script = Script(chunked_prefill=18)
    adder = adder_of(script)
    first, second, third = (waiting(script, req(f"r{i}", prompt=prompt_of(n, i), seq=i)) for i, n in enumerate((30, 2, 5)))
    one, two, three = adder.add_one_req(first), adder.add_one_req(second), adder.add_one_req(third)
    assert isinstance(one, Admitted)
    assert (one.start, one.stop, one.is_last) == (0, 16, False)
    assert isinstance(two, Admitted)
    assert (two.start, two.stop, two.is_last) == (0, 2, True)
    assert isinstance(three, Refused)


def test_without_chunking_a_lone_prompt_may_exceed_max_prefill_and_a_second_may_not() -> None:
    script = Script(chunked_prefill=0, max_prefill=16)
    adder = adder_of(script)
    big, small = waiting(script, req("big", prompt=40)), waiting(script, req("small", prompt=prompt_of(4, 1), seq=1))
    one, two = adder.add_one_req(big), adder.add_one_req(small)
    assert isinstance(one, Admitted)
    assert one.is_last
    assert isinstance(two, Refused)
    assert two.term == "input"


def context(matches: dict[str, int], *, enabled: bool = True) -> PolicyContext:
    return PolicyContext(page_size=4, cache_enabled=enabled, probe=lambda r: matches.get(r.rid, 0))


def order(name: str, reqs: list[Req], ctx: PolicyContext) -> list[str]:
    return [r.rid for r in POLICIES.get(name)(reqs, ctx)]


def test_fcfs_keeps_the_queue() -> None:
    reqs = [req(r, seq=i) for i, r in enumerate("abc")]
    assert order("fcfs", reqs, context({"c": 99})) == ["a", "b", "c"]


def test_lpm_longest_match_first_ties_by_arrival_then_rid() -> None:
    reqs = [req(r, seq=i) for i, r in enumerate("abcd")]
    assert order("lpm", reqs, context({"c": 99, "b": 40, "d": 40})) == ["c", "b", "d", "a"]
    assert order("lpm", [req("z"), req("y")], context({})) == ["y", "z"]


def test_lpm_is_fcfs_without_a_cache_and_above_128() -> None:
    reqs = [req(f"{i:03}", seq=i) for i in range(MATCHED_QUEUE_LIMIT + 1)]
    asked: list[str] = []
    ctx = PolicyContext(page_size=4, cache_enabled=True, probe=lambda r: asked.append(r.rid) or int(r.rid))
    assert order("lpm", reqs, ctx) == [r.rid for r in reqs]
    assert not asked
    assert order("lpm", reqs[:-1], ctx)[0] == "127"
    assert order("lpm", reqs[:3], context({"002": 9}, enabled=False)) == ["000", "001", "002"]


def test_lpm_puts_followers_of_a_family_last_in_this_pass() -> None:
    reqs = [req("a1", prompt=40), req("a2", prompt=41, seq=1), req("b", prompt=prompt_of(40, 3), seq=2), req("short", prompt=9, seq=3)]
    assert order("lpm", reqs, context({})) == ["a1", "b", "short", "a2"]


def test_in_batch_prefix_thresholds() -> None:
    families = InBatchPrefix(page_size=4)
    assert not families.deprioritise(req("first", prompt=32), 0)
    assert families.deprioritise(req("follower", prompt=33), 32)
    assert not families.deprioritise(req("has its own match", prompt=60), 33)
    assert not families.deprioritise(req("too short", prompt=31), 0)
    other = [*prompt_of(31), 1, *prompt_of(10)]
    assert not families.deprioritise(req("differs in the last token", prompt=other), 0)


def test_retraction_order_and_the_last_one_is_never_a_victim() -> None:
    rows = [req("few", prompt=4, outputs=1, seq=0), req("many", prompt=9, outputs=5, seq=1), req("few long", prompt=8, outputs=1, seq=2)]
    assert [r.rid for r in keep_order(rows)] == ["many", "few", "few long"]
    free = {"pages": 0}

    def retract(victim: Req) -> None:
        free["pages"] += 1

    got = retract_decode(rows, fits=lambda keep: len(keep) <= free["pages"], retract=retract)
    assert [r.rid for r in got.victims] == ["few long", "few"]
    assert got.stuck is None
    stuck = retract_decode(rows, fits=lambda keep: False, retract=lambda r: None)
    assert stuck.stuck is not None
    assert stuck.stuck.rid == "many"


def test_queue_orders_by_priority_arrival_rid_and_moves_once() -> None:
    queues = Queues()
    for made in (req("b", seq=1), req("c", seq=2, priority=3), req("a", seq=1)):
        queues.add(made)
    assert [r.rid for r in queues.waiting] == ["c", "a", "b"]
    with pytest.raises(AssertionError, match=r"^I3 "):
        queues.add(req("a"))
    queues.move(queues.by_rid["c"], Phase.DONE)
    assert sorted(queues.by_rid) == ["a", "b"]


class CountedGate:
    """Opens after `polls`; fails when `error` is set."""

    name = "counted"

    def __init__(self, polls: int, error: Finish | None = None) -> None:
        self.polls = polls
        self.error = error
        self.cancelled: list[str] = []

    def begin(self, made: Req) -> bool:
        return self.polls > 0

    def poll(self, made: Req) -> bool | Finish:
        self.polls -= 1
        return self.error if self.error is not None and self.polls == 0 else self.polls <= 0

    def cancel(self, made: Req) -> None:
        self.cancelled.append(made.rid)


def test_all_gates_must_open_and_a_cancelled_one_hears_of_it() -> None:
    one, two = CountedGate(1), CountedGate(3)
    keeper = GateKeeper([one, two, CountedGate(0)])
    made = req("r")
    assert keeper.begin(made)
    assert [keeper.poll(made) for _ in range(3)] == [False, False, True]
    assert made.times.wait_reasons == {"gate:counted": 2}
    assert GateKeeper([CountedGate(0)]).begin(made) is False
    waits = CountedGate(9)
    keeper = GateKeeper([waits])
    keeper.begin(made)
    keeper.cancel(made)
    keeper.cancel(made)
    assert waits.cancelled == ["r"]


def test_a_failing_gate_ends_the_request_with_its_error() -> None:
    script = Script()
    error = Finish(FinishKind.ERROR, status=400, code="invalid_value", message="the grammar does not compile")
    script.scheduler.state.gates = GateKeeper([CountedGate(2, error)])
    script.run(generate("r", prompt_of(5), 3))
    assert script.replies["r"].finish == error


def test_parallel_gate_opens_when_the_parent_is_done_gone_or_itself() -> None:
    queues = Queues()
    gate = ParallelGate(queues)
    parent, child = req("p"), req("c")
    object.__setattr__(child.spec, "parent_rid", "p")
    assert not gate.begin(parent)
    assert not gate.begin(child)  # an unknown parent is one that has ended
    queues.add(parent)
    assert gate.begin(child)
    assert gate.poll(child) is False
    parent.prefill_done = True
    assert gate.poll(child) is True


def test_match_limit_leaves_the_last_token_and_wanted_logprobs_uncached() -> None:
    made = req("r", prompt=20)
    assert made.match_limit() == 19
    object.__setattr__(made.spec, "logprobs", LogprobSpec(prompt_start=8))
    assert made.match_limit() == 7
    object.__setattr__(made.spec, "logprobs", LogprobSpec(prompt_start=0))
    assert made.match_limit() == 0
    object.__setattr__(made.spec, "logprobs", LogprobSpec(prompt_start=20))
    assert made.match_limit() == 19


def test_a_stop_id_counts_only_beyond_min_new_tokens() -> None:
    """The executor masks stop ids until then; should one come all the same, it does not end the request."""
    made = req("r", outputs=2)
    object.__setattr__(made.spec, "end_ids", frozenset({6}))
    object.__setattr__(made.spec, "params", SamplingParams(min_new_tokens=2))
    assert check_finish(made, 6) is None
    made.append(6)
    assert check_finish(made, 6) == Finish(FinishKind.STOP, matched=6)


def test_a_cache_hit_counts_as_a_use_of_the_prefix_under_lfu() -> None:
    """Asked three times, then an unrelated prompt asked once: the latter is newer and goes first."""
    script = Script(page_size=4, num_pages=16, cache=CacheArgs(evict="lfu"))
    hot, cold = list(range(10, 27)), list(range(30, 47))
    for k in range(3):
        script.run(generate(f"hot{k}", hot, 1))
    script.run(generate("cold", cold, 1))
    kv = script.scheduler.state.kv
    assert kv.cache.ensure_pages(kv.allocator.num_free + 4)
    assert [kv.cache.probe(RadixKey(Namespace(), pack(ids))) for ids in (hot, cold)] == [16, 0]
