"""Random lives of a scheduler on the hash LM: every invariant after every turn, every token against the definition (scheduler.md 5).

ROOTLET_HYPOTHESIS_PROFILE=long runs many more and longer scripts.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.script import PARTS, Script, generate, parts_of, prompt_of
from rootlet.config.schema import CacheArgs
from rootlet.core.hash_lm import MODES
from rootlet.core.types import LogprobSpec, Phase
from rootlet.ipc.messages import AbortReq, DetokSpec, FlushCacheReq, GetStateReq, PauseReq, PinReq, ShutdownReq, StopReq, TokenizedGenerateReqInput
from rootlet.scheduler.control import plan_line
from rootlet.scheduler.policies import POLICIES
from rootlet.scheduler.state import retract_req

LONG = os.environ.get("ROOTLET_HYPOTHESIS_PROFILE") == "long"
MIN_EVENTS, MAX_EVENTS = (8, 60) if LONG else (5, 25)

lengths = st.one_of(st.integers(1, 24), st.integers(1, 90))

params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 3),
        "choice_index": st.integers(0, 2),
        "frequency_penalty": st.sampled_from([0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "min_new_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (9, 10, 11)]),
        "priority": st.sampled_from([0, 0, -1, 1, 20, 40]),
        "user": st.sampled_from([None, "a", "b"]),
        "routing_key": st.sampled_from([None, "x", "y"]),
        "stream": st.booleans(),
        "detok": st.sampled_from([DetokSpec(), DetokSpec(stop=("x",))]),
        "deadline_s": st.sampled_from([None, 0.2, 5.0]),
        "extra_key": st.sampled_from([None, "a"]),
        "logprobs": st.sampled_from([None, LogprobSpec(), LogprobSpec(top_n=2, prompt_start=0), LogprobSpec(prompt_start=5)]),
    },
)

events = st.one_of(
    st.tuples(st.just("generate"), lengths, st.integers(0, 3), st.sampled_from([None, 0, 1, 2, 5, 12, 40]), params),
    st.tuples(st.just("generate"), lengths, st.integers(0, 1), st.integers(1, 20), st.just({})),
    st.tuples(st.just("burst"), st.integers(2, 8), lengths, st.integers(1, 40)),
    st.tuples(st.just("burst"), st.integers(2, 8), lengths, st.integers(1, 40)),
    st.tuples(st.just("child"), st.integers(0, 99)),
    st.tuples(st.just("turns"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 99)),
    st.tuples(st.just("stop"), st.integers(0, 99), st.integers(0, 8)),
    st.tuples(st.just("retract"), st.integers(0, 99)),
    st.tuples(st.just("pin"), st.integers(0, 99), st.sampled_from([0.1, 5.0])),
    st.tuples(st.just("unpin"), st.sampled_from([None, "pin-1", "pin-2"])),
    st.tuples(st.just("fail"), st.integers(0, 99)),
    st.tuples(st.just("say"), st.sampled_from(["abort_all", "flush", "state", "request"])),
    st.tuples(st.just("say"), st.sampled_from(["pause", "pause_retract", "pause_abort", "resume", "resume"])),
    st.just(("wait",)),
)

houses = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4, 16]),
        "num_pages": st.integers(8, 64),
        "depth": st.integers(1, 3),
        "mode": st.sampled_from(MODES),
        "parts": st.sampled_from(PARTS),
        "window_len": st.sampled_from([1, 3, 8, 20]),
        "num_window_pages": st.sampled_from([1, 6, 40]),
        "num_states": st.sampled_from([1, 2, 5, 24]),
        "grid_pages": st.sampled_from([1, 2, 4]),
        "eos_rate": st.sampled_from([0.0, 0.1]),
        "schedule_policy": st.sampled_from(POLICIES.names()),
        "mixed_chunk": st.booleans(),
        "chunked_prefill": st.sampled_from([0, 16, 17, 40]),
        "max_prefill": st.sampled_from([8, 32, 512]),
        "max_running": st.integers(1, 8),
        "max_queue": st.sampled_from([4, 1024]),
        "aging": st.sampled_from([0, 1, 64]),
        "preempt_gap": st.sampled_from([-1, 0, 10]),
        "min_free_slots": st.sampled_from([0, 0, 2, 9]),
        "decode_interval": st.sampled_from([0, 0, 1, 4]),
        "retract_every": st.sampled_from([0, 0, 1, 3]),
        "conservativeness": st.sampled_from([0.1, 1.0]),
        "cache": st.sampled_from([CacheArgs(), CacheArgs(prefix_cache=False), CacheArgs(evict="fifo")]),
        "capacity": st.sampled_from([{"max_context_len": 160}, {"max_context_len": 96, "max_step_tokens": 48}]),
    }
)


def script_of(house: dict[str, Any]) -> Script:
    """Pools of windows and states beside full attention, from as small as can work at all."""
    own = {name: house[name] for name in ("window_len", "num_window_pages", "num_states", "grid_pages")}
    capacity = {**house["capacity"], **parts_of(house["parts"], page_size=house["page_size"], **own)}
    return Script(**{name: value for name, value in house.items() if name not in own and name not in ("parts", "capacity")}, capacity=capacity)


class Player:
    """Turns events into messages. Rids are numbered; an event about number n means the (n modulo sent)-th request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.num_sent = 0

    def rid(self, n: int) -> str:
        return f"r{n % max(self.num_sent, 1)}"

    def new(self, length: int, family: int, max_new: int | None, **options: Any) -> TokenizedGenerateReqInput:
        """Lengths wrap a little beyond the pool, so that some requests are refused at the door and most are not."""
        rid, self.num_sent = f"r{self.num_sent}", self.num_sent + 1
        length = 1 + (length - 1) % (self.script.capacity.pool_len + 2)
        return generate(rid, prompt_of(length, family, shared=12), max_new, **options)

    def play(self, event: tuple[Any, ...]) -> None:
        getattr(self, event[0])(*event[1:])
        self.compare_probes()

    def compare_probes(self) -> None:
        """A probe that goes on from the last one's end says what one from the root says (metamorphic rule f)."""
        kv = self.script.scheduler.state.kv
        for req in self.script.scheduler.state.queues.live():
            assert kv.probe(req) == kv.cache.probe(req.key(req.num_tokens, limit=req.match_limit())), req.rid

    def generate(self, length: int, family: int, max_new: int | None, options: dict[str, Any]) -> None:
        self.script.turn(self.new(length, family, max_new, **options))

    def burst(self, count: int, length: int, max_new: int) -> None:
        self.script.turn(*(self.new(length + 3 * i, i % 3, max_new + i, temperature=0.9, ignore_eos=i % 2 == 0) for i in range(count)))

    def child(self, n: int) -> None:
        parent = self.script.sent.get(self.rid(n))
        if parent is not None:
            rid, self.num_sent = f"r{self.num_sent}", self.num_sent + 1
            self.script.turn(generate(rid, [], 6, parent_rid=parent.rid, choice_index=1, input_ids=parent.input_ids))

    def turns(self, n: int) -> None:
        for _ in range(n):
            self.script.turn()

    def abort(self, n: int) -> None:
        self.script.turn(AbortReq(rid=self.rid(n)))

    def stop(self, n: int, keep_len: int) -> None:
        self.script.turn(StopReq(rid=self.rid(n), keep_len=keep_len, matched="x"))

    def retract(self, n: int) -> None:
        state = self.script.scheduler.state
        req = state.queues.by_rid.get(self.rid(n))
        if req is not None and req.phase in (Phase.PREFILL, Phase.DECODE):
            retract_req(state, req)
        self.script.turn()

    def fail(self, n: int) -> None:
        if self.script.scheduler.state.queues.by_rid.get(self.rid(n)) is not None:
            self.script.executor.fail(self.rid(n))
        self.script.turn()

    def pin(self, n: int, ttl_s: float) -> None:
        msg = self.script.sent.get(self.rid(n))
        if msg is not None:
            self.script.turn(PinReq("p", "pin", input_ids=msg.input_ids, ttl_s=ttl_s, extra_key=msg.extra_key))

    def unpin(self, pin_id: str | None) -> None:
        self.script.turn(PinReq("u", "unpin", pin_id=pin_id))

    def wait(self) -> None:
        self.script.clock.advance(0.15)
        self.script.turn()

    def say(self, name: str) -> None:
        messages = {
            "abort_all": AbortReq(abort_all=True),
            "pause": PauseReq("p", paused=True),
            "pause_retract": PauseReq("p", paused=True, mode="retract"),
            "pause_abort": PauseReq("p", paused=True, mode="abort"),
            "resume": PauseReq("p", paused=False),
            "flush": FlushCacheReq("f", timeout_s=1.0),
            "state": GetStateReq("s", "state"),
            "request": GetStateReq("r", "request", {"rid": self.rid(0)}),
        }
        self.script.turn(messages[name])


@settings(
    max_examples=4000 if LONG else 400,
    deadline=None,
    derandomize=not LONG,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(house=houses, script_events=st.lists(events, min_size=MIN_EVENTS, max_size=MAX_EVENTS), shutdown=st.booleans())
def test_random_scripts_keep_every_invariant_and_every_token(house: dict[str, Any], script_events: list[tuple[Any, ...]], shutdown: bool) -> None:
    script = script_of(house)
    player = Player(script)
    for event in script_events:
        player.play(event)
    script.turn(PauseReq("p", paused=False))
    if shutdown:
        script.turn(ShutdownReq(drain_s=1.0))
        script.turn(ShutdownReq(drain_s=0.0))
    script.run()
    script.turn(PinReq("u", "unpin"))
    script.check_all_replies()


def test_a_retraction_after_each_token_ends_though_slowly() -> None:
    """One row at a time, each token behind a whole context computed anew: found by the long profile, which had taken it for a standstill."""
    script = script_of(
        {
            "page_size": 1, "num_pages": 44, "depth": 3, "mode": "eager", "parts": "full+swa+mamba", "window_len": 1, "num_window_pages": 1,
            "num_states": 1, "grid_pages": 1, "eos_rate": 0.0, "schedule_policy": "dfs-weight", "mixed_chunk": True, "chunked_prefill": 0,
            "max_prefill": 8, "max_running": 8, "max_queue": 4, "aging": 64, "preempt_gap": -1, "min_free_slots": 2, "decode_interval": 4,
            "retract_every": 1, "conservativeness": 1.0, "cache": CacheArgs(), "capacity": {"max_context_len": 96, "max_step_tokens": 48},
        }
    )  # fmt: skip
    player = Player(script)
    player.play(("burst", 7, 10, 12))
    script.run()
    script.check_all_replies()


@settings(max_examples=400 if LONG else 40, deadline=None, derandomize=not LONG, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(house=houses, script_events=st.lists(events, min_size=MIN_EVENTS, max_size=MAX_EVENTS))
def test_same_script_gives_the_same_plans(house: dict[str, Any], script_events: list[tuple[Any, ...]]) -> None:
    """I11."""
    logs = []
    for _ in range(2):
        script = script_of(house)
        player = Player(script)
        for event in script_events:
            player.play(event)
        logs.append([(plan_line(p), p.input_ids.tolist()) for p in script.plans])
    assert logs[0] == logs[1]
