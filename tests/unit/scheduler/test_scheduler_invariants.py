"""Every law can be broken, and then says so: deliberate breaks, each caught under its own number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fixtures.script import Script, generate, prompt_of
from rootlet.core.types import Finish, FinishKind, Phase
from rootlet.scheduler import commit, invariants, scheduler
from rootlet.scheduler.kv_owner import KvOwner
from rootlet.scheduler.queue import Queues
from rootlet.scheduler.scheduler import Scheduler


def busy(**options: object) -> Script:
    """A house with a decoding, a half prefilled, and a waiting request."""
    script = Script(chunked_prefill=8, max_running=2, **options)  # type: ignore[arg-type]
    script.turn(generate("decoding", prompt_of(9), 30))
    script.turn()
    script.turn(generate("chunked", prompt_of(40, 1), 5), generate("waiting", prompt_of(9, 2), 5))
    state = script.scheduler.state
    assert (len(state.queues.decode), len(state.queues.prefill), len(state.queues.waiting)) == (1, 1, 1)
    return script


def leak_a_page(script: Script) -> None:
    assert script.scheduler.state.kv.allocator.alloc(1) is not None


def two_owners(script: Script) -> None:
    state = script.scheduler.state
    a, b = state.queues.decode[0], state.queues.prefill[0]
    assert a.kv.row is not None
    assert b.kv.row is not None
    last = b.kv.kv_allocated_len // state.limits.page_size - 1
    state.kv.req_to_token.table[b.kv.row, last] = state.kv.req_to_token.table[a.kv.row, (a.kv.kv_allocated_len - 1) // state.limits.page_size]


def forget_a_lock(script: Script) -> None:
    cache = script.scheduler.state.kv.cache
    node = script.scheduler.state.queues.decode[0].kv.lock.node
    assert node is not None
    cache.inc_lock_ref(node)


def two_containers(script: Script) -> None:
    queues = script.scheduler.state.queues
    queues.waiting.append(queues.decode[0])


def no_container(script: Script) -> None:
    script.scheduler.state.queues.waiting.clear()


def lose_a_row(script: Script) -> None:
    script.scheduler.state.kv.req_to_token.alloc_row()


def protected_past_committed(script: Script) -> None:
    kv = script.scheduler.state.queues.decode[0].kv
    kv.cache_protected_len = kv.kv_committed_len + 4


def planned_off_by_one(script: Script) -> None:
    script.scheduler.state.queues.decode[0].outputs.append(5)
    script.scheduler.state.queues.decode[0].tokens += b"\5\0\0\0"


def lose_a_pending_draw(script: Script) -> None:
    script.scheduler.state.queues.decode[0].pending += 1
    script.scheduler.state.queues.decode[0].planned += 1
    script.scheduler.state.queues.decode[0].kv.kv_committed_len += 1
    script.scheduler.state.queues.decode[0].kv.kv_allocated_len += 1


def exceed_max_new(script: Script) -> None:
    object.__setattr__(script.scheduler.state.queues.decode[0].spec, "max_new", 0)


BREAKS: list[tuple[str, Callable[[Script], None]]] = [
    ("I1", leak_a_page),
    ("I1", two_owners),
    ("I2", forget_a_lock),
    ("I3", two_containers),
    ("I3", no_container),
    ("I3", lose_a_row),
    ("I4", protected_past_committed),
    ("I4", planned_off_by_one),
    ("I5", lose_a_pending_draw),
    ("I9", exceed_max_new),
]


@pytest.mark.parametrize("law, break_it", BREAKS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_broken_state_is_caught_under_its_number(law: str, break_it: Callable[[Script], None]) -> None:
    script = busy()
    invariants.check_all(script.scheduler.state)
    break_it(script)
    with pytest.raises(AssertionError, match=f"^{law} "):
        invariants.check_all(script.scheduler.state)


def test_i1_code_that_forgets_to_release_an_aborted_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: KvOwner, req: object, *, publish_len: int | None) -> None: ...

    script = busy()
    monkeypatch.setattr(KvOwner, "release", forget)
    script.scheduler.control.end_all(Finish(FinishKind.ABORT))
    with pytest.raises(AssertionError, match=r"^I10 "):
        invariants.check_cheap(script.scheduler.state)
    with pytest.raises(AssertionError, match=r"^I3 rows"):
        invariants.check_i3_containers(script.scheduler.state)


def test_i2_code_that_skips_the_unlock_of_a_refused_request(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(num_pages=16)
    script.turn(generate("a", prompt_of(30), 20, ignore_eos=True))
    script.turn()
    monkeypatch.setattr(KvOwner, "unlock", lambda self, locked: None)
    with pytest.raises(AssertionError, match=r"^I2 "):
        script.run(generate("b", prompt_of(31), 30))


def test_i6_a_plan_that_writes_a_free_page() -> None:
    script = busy()
    plan = script.plans[-1]
    state = script.scheduler.state
    invariants.check_i6_plan(state, plan)
    page = int(plan.out_cache_loc[0]) // state.limits.page_size
    script.scheduler.control.end_all(Finish(FinishKind.ABORT))
    state.kv.cache.flush()
    assert page in state.kv.allocator.free_pages()
    with pytest.raises(AssertionError, match=r"^I6 "):
        invariants.check_i6_plan(state, plan)


def test_i7_a_second_terminal_message() -> None:
    script = busy()
    req = script.scheduler.state.queues.waiting[0]
    script.scheduler.state.outbox.terminal(req, Finish(FinishKind.LENGTH))
    with pytest.raises(AssertionError, match=r"^I7 "):
        script.scheduler.control.end_all(Finish(FinishKind.ABORT))


def test_i8_a_plan_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    script = busy()
    monkeypatch.setattr(Scheduler, "get_new_batch_prefill", lambda self: None)
    monkeypatch.setattr(Scheduler, "_update_running_batch", lambda self: None)
    with pytest.raises(AssertionError, match=r"^I8 "):
        script.run()


def test_i9_code_that_does_not_stop_at_max_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "check_finish", lambda req, token: None)
    monkeypatch.setattr(Queues, "decodable", lambda self: list(self.decode))
    with pytest.raises(AssertionError, match=r"^I9 "):
        Script().run(generate("r", prompt_of(5), 3))


def test_i10_idle_with_something_held() -> None:
    script = Script().run(generate("r", prompt_of(9), 3))
    leak_a_page(script)
    with pytest.raises(AssertionError, match=r"^I10 "):
        invariants.check_i10_idle(script.scheduler.state)


def test_hash_lm_catches_pages_that_are_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode step's page is written into the table only after the plan was frozen: the executor reads an old page."""
    grow = KvOwner.grow

    def grow_without_telling(self: KvOwner, req) -> None:
        grow(self, req)
        self.req_to_token.take_deltas()

    monkeypatch.setattr(KvOwner, "grow", grow_without_telling)
    with pytest.raises(AssertionError, match="not what the page table says"):
        Script().run(generate("r", prompt_of(4), 3))


def test_hash_lm_catches_a_result_applied_to_an_older_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the epoch a retracted request takes tokens of its former life twice."""
    real = scheduler.retract_req

    def without_epoch(state, req, **why) -> None:
        real(state, req, **why)
        req.epoch -= 1

    monkeypatch.setattr(scheduler, "retract_req", without_epoch)
    with pytest.raises(AssertionError):
        Script(depth=3, retract_every=1).run(generate("r", prompt_of(6), 12)).check_all_replies()


def test_phases_of_the_busy_house_are_what_the_breaks_assume() -> None:
    queues = busy().scheduler.state.queues
    assert {r.rid: r.phase for r in queues.live()} == {"decoding": Phase.DECODE, "chunked": Phase.PREFILL, "waiting": Phase.WAITING}
