"""`TokenizerManager` against a scheduler that the test plays itself: what is sent, what comes out, and who is told of what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from fixtures.fake_tokens import ByteTokens, all_bytes
from rootlet.config.schema import RuntimeConfig, SchedulerArgs, ServerArgs
from rootlet.core.clock import VirtualClock
from rootlet.core.errors import ContextOverflow, InvalidValue, PoolOverflow, QueueFull, RootletError, Unavailable
from rootlet.core.ids import CountingIds
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Finish, FinishKind, LogprobSpec
from rootlet.frontend.tokenizer_manager import INLINE_CHARS, TokenizerManager
from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.ipc.codec import scheduler_codec
from rootlet.ipc.messages import (
    AbortReq,
    BatchTokenIDOutput,
    DetokSpec,
    FlushCacheReq,
    FlushCacheReqOutput,
    GetStateReq,
    GetStateReqOutput,
    HealthTick,
    PauseReq,
    SchedulerError,
    SchedulerReady,
    StopReq,
    TokenIDOutput,
    TokenizedGenerateReqInput,
)

READY = SchedulerReady(num_pages=64, page_size=16, max_rows=4, max_context_len=100, max_prompt_len=90, vocab_size=256)
LENGTH = Finish(FinishKind.LENGTH)


class HeldTokens(ByteTokens):
    """Its `encode` says that it was entered, and returns when it is released."""

    def __init__(self) -> None:
        super().__init__([b"a"])
        self.entered, self.release = threading.Event(), threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.entered.set()
        self.release.wait(60.0)
        return [1]


class Front:
    """A manager whose scheduler is the test: `sent` is what it would have received."""

    def __init__(self, *, tokens: ByteTokens | None = None, max_queue: int = 16, ready: bool = True) -> None:
        self.sent: list[Any] = []
        self.clock = VirtualClock(100.0)
        config = RuntimeConfig(scheduler=SchedulerArgs(max_queue=max_queue), server=ServerArgs(max_n=8, max_logprobs=5, log_requests=False))
        self.manager = TokenizerManager(self.sent.append, config, clock=self.clock, ids=CountingIds())
        if ready:
            self.manager.attach_model(tokens or all_bytes(), chat_template=None, served_names=("m",), sampling_defaults={})
            self.manager.handle(READY)

    def reads(self, req: GenerateReq) -> Reader:
        return Reader(self.manager, req)

    def output(self, rid: str, *ids: int, finish: Finish | None = None, first: bool = False, stop: tuple[str, ...] = ()) -> None:
        spec = DetokSpec(stop=stop) if first else None
        self.manager.handle(BatchTokenIDOutput((TokenIDOutput(rid=rid, token_ids=ids, spec=spec, finish=finish, completion_len=len(ids)),)))

    @property
    def requests(self) -> list[TokenizedGenerateReqInput]:
        return [m for m in self.sent if isinstance(m, TokenizedGenerateReqInput)]

    @property
    def aborted(self) -> list[str | None]:
        return [m.rid for m in self.sent if isinstance(m, AbortReq)]


class Reader:
    """A client in a task of its own: `chunks` so far, `error` if it was refused."""

    def __init__(self, manager: TokenizerManager, req: GenerateReq) -> None:
        self.chunks: list[GenerateChunk] = []
        self.error: RootletError | None = None
        self.task = asyncio.create_task(self._read(manager, req))

    async def _read(self, manager: TokenizerManager, req: GenerateReq) -> None:
        try:
            async for chunk in manager.generate(req):
                self.chunks.append(chunk)
        except RootletError as error:
            self.error = error

    @property
    def text(self) -> str:
        return "".join(c.text for c in self.chunks)


async def settle() -> None:
    """Every task runs until it waits for something that only the test can bring."""
    for _ in range(20):
        await asyncio.sleep(0)


def scenario(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(work())

    run.__name__ = work.__name__
    return run


def _req(prompt: str = "ab", **fields: Any) -> GenerateReq:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    return GenerateReq(prompt=prompt, sampling=sampling, **fields)


@scenario
async def test_one_request_from_text_to_text() -> None:
    front = Front()
    reader = front.reads(_req("hi", rid="r", sampling={"max_new_tokens": 3}))
    await settle()
    (sent,) = front.requests
    assert (sent.rid, np.frombuffer(sent.input_ids, "<i4").tolist(), sent.sampling.max_new_tokens, sent.parent_rid) == ("r", [104, 105], 3, None)
    front.output("r", 65, first=True)
    await settle()
    front.output("r", 66, finish=LENGTH)
    await settle()
    assert [(c.text, c.token_ids, c.completion_len, c.finish, c.prompt_len) for c in reader.chunks] == [
        ("A", (65,), 1, None, 2),
        ("B", (66,), 2, LENGTH, 2),
    ]
    assert front.manager.num_open == 0
    assert front.aborted == []


@scenario
async def test_n_choices_share_a_parent_and_a_seed() -> None:
    front = Front()
    reader = front.reads(_req("hi", rid="r", sampling={"n": 3, "seed": 7}, logprobs=LogprobSpec(prompt_start=0)))
    await settle()
    assert [(m.rid, m.parent_rid, m.sampling.choice_index, m.sampling.seed, m.sampling.n) for m in front.requests] == [
        ("r", None, 0, 7, 1),
        ("r-1", "r", 1, 7, 1),
        ("r-2", "r", 2, 7, 1),
    ]
    assert [m.logprobs.prompt_start if m.logprobs else -1 for m in front.requests] == [0, None, None]
    for k, rid in enumerate(["r-2", "r", "r-1"]):
        front.output(rid, 65 + k, first=True, finish=LENGTH)
    await settle()
    assert {c.index: (c.text, c.rid) for c in reader.chunks} == {0: ("B", "r"), 1: ("C", "r"), 2: ("A", "r")}
    assert [c.finish for c in reader.chunks] == [LENGTH] * 3
    assert front.manager.num_open == 0


@scenario
async def test_an_unseeded_request_is_given_a_seed_and_told() -> None:
    front = Front()
    reader = front.reads(_req(rid="r"))
    await settle()
    front.output("r", 65, first=True, finish=LENGTH)
    await settle()
    assert reader.chunks[0].seed == front.requests[0].sampling.seed == 1


@pytest.mark.parametrize(
    ("prompt_len", "max_new", "want"),
    [(89, None, 11), (90, 5, 5), (90, 50, 10), (10, 0, 0), (10, None, 90)],
)
def test_row_32_output_is_clamped_to_the_context(prompt_len: int, max_new: int | None, want: int) -> None:
    async def run() -> None:
        front = Front()
        reader = front.reads(_req("x" * prompt_len, sampling={"max_new_tokens": max_new}))
        await settle()
        assert front.requests[0].sampling.max_new_tokens == want
        reader.task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt_len", "error"), [(91, PoolOverflow), (99, PoolOverflow), (100, ContextOverflow), (101, ContextOverflow), (1000, ContextOverflow)]
)
def test_row_32_too_long_prompts_are_refused_with_both_numbers(prompt_len: int, error: type[RootletError]) -> None:
    async def run() -> None:
        front = Front()
        reader = front.reads(GenerateReq(input_ids=(7,) * prompt_len, param="prompt"))
        await settle()
        assert type(reader.error) is error
        assert str(prompt_len) in str(reader.error)
        assert ("100" if error is ContextOverflow else "90") in str(reader.error)
        assert front.sent == []
        assert front.manager.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("req", "param"),
    [
        (GenerateReq(prompt=""), "prompt"),
        (GenerateReq(input_ids=()), "prompt"),
        (GenerateReq(input_ids=(1, 256)), "prompt"),
        (GenerateReq(input_ids=(-1,)), "prompt"),
        (GenerateReq(input_ids=(2**63,)), "prompt"),
        (GenerateReq(), "prompt"),
        (GenerateReq(prompt="a", input_ids=(1,)), "prompt"),
        (GenerateReq(prompt="a", sampling=SamplingParams(stop=("",))), "stop"),
        (GenerateReq(prompt="a", sampling=SamplingParams(n=9)), "n"),
        (GenerateReq(prompt="a", sampling=SamplingParams(temperature=float("nan"))), "temperature"),
        (GenerateReq(prompt="a", sampling=SamplingParams(logit_bias={256: 1.0})), "logit_bias"),
        (GenerateReq(prompt="a", logprobs=LogprobSpec(top_n=6)), "top_logprobs"),
        (GenerateReq(prompt="a", rid=""), "rid"),
        (GenerateReq(prompt="a", rid="x\n"), "rid"),
        (GenerateReq(prompt="a", deadline_s=0.0), "deadline_s"),
        (GenerateReq(prompt="a", deadline_s=float("nan")), "deadline_s"),
        (GenerateReq(prompt="a", sampling=SamplingParams(stop=("\ud800",))), "stop"),
        (GenerateReq(prompt="a", cache_salt="x\udfff"), "cache_salt"),
        (GenerateReq(prompt="a", user="\udc00"), "user"),
        (GenerateReq(prompt="a", rid="\udc00"), "rid"),
        (GenerateReq(prompt="a", priority=2**70), "priority"),
        (GenerateReq(prompt="a", logprobs=LogprobSpec(prompt_start=2)), "logprob_start_len"),
        (GenerateReq(prompt="a", logprobs=LogprobSpec(prompt_start=-1)), "logprob_start_len"),
        (GenerateReq(prompt="a", logprobs=LogprobSpec(token_ids=(256,))), "token_ids_logprob"),
    ],
)
def test_bad_values_are_refused_at_the_door(req: GenerateReq, param: str) -> None:
    async def run() -> None:
        front = Front()
        reader = front.reads(req)
        await settle()
        assert isinstance(reader.error, InvalidValue)
        assert reader.error.param == param
        assert front.sent == []
        assert front.manager.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize(("skip", "ids", "tail"), [(True, (0, 2), [0]), (True, (2, 2), []), (False, (0, 2), [2]), (True, (2, 1, 2), [1])])
def test_the_left_neighbour_travels_with_the_request(skip: bool, ids: tuple[int, ...], tail: list[int]) -> None:
    async def run() -> None:
        front = Front(tokens=ByteTokens([b" a", b" b", b"<s>"], specials=[2], left_context_dependent=True))
        reader = front.reads(GenerateReq(input_ids=ids, sampling=SamplingParams(skip_special_tokens=skip)))
        await settle()
        assert np.frombuffer(front.requests[0].detok.prompt_tail, "<i4").tolist() == tail
        reader.task.cancel()

    asyncio.run(run())


@scenario
async def test_whatever_passes_the_door_fits_the_wire() -> None:
    front = Front()
    huge = {"top_k": 2**70, "max_new_tokens": 2**70, "min_new_tokens": 2**69, "seed": -(2**63)}
    reader = front.reads(_req("é", rid="r", sampling={**huge, "stop": ("ü", "🚀")}, user="ü", priority=-5))
    await settle()
    codec = scheduler_codec()
    assert codec.decode(codec.encode(front.requests[0])) == front.requests[0]
    assert front.requests[0].sampling.top_k == READY.vocab_size
    reader.task.cancel()
    await settle()


@scenario
async def test_row_33_a_client_that_leaves_is_aborted_at_once_and_kept_until_the_echo() -> None:
    front = Front()
    reader = front.reads(_req(rid="r", sampling={"n": 2}))
    await settle()
    front.output("r", 65, first=True)
    await settle()
    reader.task.cancel()
    await settle()
    assert front.aborted == ["r", "r-1"]
    assert front.manager.num_open == 1  # until the scheduler's echo
    front.output("r", finish=Finish(FinishKind.ABORT))
    front.output("r-1", finish=Finish(FinishKind.ABORT), first=True)
    assert front.manager.num_open == 0


@scenario
async def test_row_33_a_client_that_leaves_before_dispatch_costs_nothing() -> None:
    slow = HeldTokens()
    front = Front(tokens=slow)
    reader = front.reads(_req("x" * (INLINE_CHARS + 1)))
    await asyncio.to_thread(slow.entered.wait, 60.0)
    reader.task.cancel()
    await settle()
    slow.release.set()
    assert (front.sent, front.manager.num_open) == ([], 0)


@scenario
async def test_row_89_the_loop_stays_free_while_a_long_text_is_tokenized() -> None:
    slow = HeldTokens()
    front = Front(tokens=slow)
    reader = front.reads(_req("x" * (INLINE_CHARS + 1), rid="r"))
    await asyncio.to_thread(slow.entered.wait, 60.0)
    assert front.manager.health() == (True, "ready")  # answered in the middle of it
    front.manager.abort("r")
    slow.release.set()
    await asyncio.wait_for(reader.task, 60.0)
    assert [c.finish.kind for c in reader.chunks if c.finish] == [FinishKind.ABORT]
    assert front.sent == []


@scenario
async def test_row_86_a_drain_that_begins_while_a_text_is_tokenized_refuses_it() -> None:
    slow = HeldTokens()
    front = Front(tokens=slow)
    reader = front.reads(_req("x" * (INLINE_CHARS + 1)))
    await asyncio.to_thread(slow.entered.wait, 60.0)
    front.manager.begin_drain()
    slow.release.set()
    await asyncio.wait_for(reader.task, 60.0)
    assert isinstance(reader.error, Unavailable)
    assert (reader.error.code, front.sent, front.manager.num_open) == ("shutting_down", [], 0)


@scenario
async def test_abort_takes_exact_rids_only() -> None:
    front = Front()
    readers = [front.reads(_req(rid=rid)) for rid in ("batch_1", "batch_10")]
    await settle()
    for unknown in ("batch", "", None):
        front.manager.abort(unknown)
    assert front.aborted == []
    front.manager.abort("batch_1")
    assert front.aborted == ["batch_1"]
    front.manager.abort(None, abort_all=True)
    assert front.aborted == ["batch_1", "batch_1", "batch_10"]
    for reader in readers:
        reader.task.cancel()
    await settle()


@scenario
async def test_the_id_of_a_batch_aborts_all_that_is_open_of_it_and_nothing_else() -> None:
    front = Front()
    batch = [front.reads(_req(rid=f"b-{k}", batch_rid="b", sampling={"n": n})) for k, n in enumerate((1, 2))]
    other = front.reads(_req(rid="b-10"))
    await settle()
    front.output("b-0", finish=Finish(FinishKind.LENGTH), first=True)
    await settle()
    taken = [front.reads(_req(rid="b")), front.reads(_req(rid="b-10-0", batch_rid="b-10"))]  # one name, one thing
    await settle()
    assert [(type(t.error), t.error and t.error.param) for t in taken] == [(InvalidValue, "rid")] * 2
    front.manager.abort("b")
    assert front.aborted == ["b-1", "b-1-1"]
    front.output("b-1", finish=Finish(FinishKind.ABORT), first=True)
    front.output("b-1-1", finish=Finish(FinishKind.ABORT), first=True)
    await settle()
    assert [c.finish.kind for c in batch[1].chunks if c.finish] == [FinishKind.ABORT] * 2
    front.manager.abort("b")  # again: nothing is left of it
    assert front.aborted == ["b-1", "b-1-1"]
    again = front.reads(_req(rid="b"))  # and the name is free
    await settle()
    assert (again.error, other.error, front.manager.num_open) == (None, None, 2)
    for reader in (again, other):
        reader.task.cancel()
    await settle()


@scenario
async def test_an_aborted_stream_ends_with_a_terminal_chunk() -> None:
    front = Front()
    reader = front.reads(_req(rid="r"))
    await settle()
    front.output("r", 65, first=True)
    front.output("r", finish=Finish(FinishKind.ABORT, message="why"))
    await settle()
    assert reader.text == "A"
    assert reader.chunks[-1].finish == Finish(FinishKind.ABORT, message="why")


@scenario
async def test_a_rid_names_one_request_at_a_time() -> None:
    front = Front()
    first = front.reads(_req(rid="r", sampling={"n": 2}))
    await settle()
    for rid in ("r", "r-1"):
        again = front.reads(_req(rid=rid))
        await settle()
        assert isinstance(again.error, InvalidValue)
        assert again.error.param == "rid"
    for rid in ("r", "r-1"):
        front.output(rid, 65, first=True, finish=LENGTH)
    await first.task
    front.reads(_req(rid="r")).task.add_done_callback(lambda t: None)
    await settle()
    assert front.requests[-1].rid == "r"


@scenario
async def test_row_02_a_stop_string_tells_the_scheduler_and_frees_the_name() -> None:
    front = Front()
    reader = front.reads(_req(rid="r", sampling={"stop": ("B",)}))
    await settle()
    front.output("r", 65, 66, first=True, stop=("B",))
    await settle()
    assert (reader.text, reader.chunks[-1].finish, reader.chunks[-1].completion_len) == ("A", Finish(FinishKind.STOP, matched="B"), 1)
    assert [m for m in front.sent if isinstance(m, StopReq)] == [StopReq("r", keep_len=1, matched="B")]
    assert front.manager.num_open == 0
    again = front.reads(_req(rid="r"))
    await settle()
    name = front.requests[-1].rid
    assert name != "r"  # the scheduler may still be winding the first one down
    front.output("r", 67, finish=LENGTH)
    front.output(name, 68, first=True, finish=LENGTH)
    await settle()
    assert (again.text, again.chunks[-1].rid) == ("D", "r")


@scenario
async def test_row_36_a_slow_reader_gets_merged_chunks() -> None:
    front = Front()
    chunks = front.manager.generate(_req(rid="r"))
    first = asyncio.ensure_future(anext(chunks))
    await settle()
    front.output("r", 65, first=True)
    assert (await first).text == "A"
    for k in range(1000):
        front.output("r", 97 + k % 26)
    front.output("r", 66, finish=LENGTH)
    rest = [c async for c in chunks]
    assert len(rest) == 1
    assert (len(rest[0].text), len(rest[0].token_ids), rest[0].completion_len, rest[0].finish) == (1001, 1001, 1002, LENGTH)


@pytest.mark.parametrize(
    ("finish", "error", "code"),
    [
        (Finish(FinishKind.ERROR, status=503, code="queue_full", message="full"), QueueFull, "queue_full"),
        (Finish(FinishKind.ERROR, status=503, code="shutting_down", message="bye"), Unavailable, "shutting_down"),
        (Finish(FinishKind.ERROR, status=400, code="kv_pool_exceeded", message="big"), InvalidValue, "kv_pool_exceeded"),
        (Finish(FinishKind.ERROR, status=500, code="internal_error", message="nan"), RootletError, "internal_error"),
    ],
)
def test_a_failure_before_the_first_chunk_is_raised_and_later_is_a_chunk(finish: Finish, error: type[RootletError], code: str) -> None:
    async def run() -> None:
        front = Front()
        refused, streaming = front.reads(_req(rid="a", sampling={"n": 2})), front.reads(_req(rid="b"))
        await settle()
        front.output("b", 65, first=True)
        await settle()
        for rid in ("a", "b"):
            front.output(rid, finish=finish)
        await settle()
        assert isinstance(refused.error, error)
        assert refused.error.code == code
        assert front.aborted == ["a-1"]
        assert streaming.error is None
        assert streaming.chunks[-1].finish == finish

    asyncio.run(run())


@scenario
async def test_more_choices_than_may_ever_wait_are_refused_for_good() -> None:
    """Not as a full queue: trying again later would never help."""
    front = Front(max_queue=2)
    readers = [front.reads(_req(sampling={"n": n})) for n in (6, 7)]  # 4 rows, 2 places to wait
    await settle()
    assert readers[0].error is None
    assert isinstance(readers[1].error, InvalidValue)
    assert (readers[1].error.param, "--max-queue" in str(readers[1].error)) == ("n", True)
    readers[0].task.cancel()
    await settle()


@scenario
async def test_row_39_the_queue_is_bounded_at_the_door() -> None:
    front = Front(max_queue=2)
    readers = [front.reads(_req()) for _ in range(8)]
    await settle()
    assert len(front.requests) == 6  # 4 rows + 2 waiting
    refused = [r.error for r in readers if r.error]
    assert [type(e) for e in refused] == [QueueFull, QueueFull]
    assert all(e.retry_after_s and e.retry_after_s >= 1.0 for e in refused)
    for reader in readers:
        reader.task.cancel()
    await settle()


@scenario
async def test_row_87_a_dead_engine_ends_every_request_and_refuses_new_ones() -> None:
    front = Front()
    streaming, waiting, leaving = (front.reads(_req(rid=rid)) for rid in "abc")
    asking = asyncio.create_task(front.manager.get_state("info"))
    await settle()
    front.output("a", 65, first=True)
    leaving.task.cancel()
    await settle()
    front.manager.handle(SchedulerError("it broke", 1))
    await settle()
    assert streaming.chunks[-1].finish == Finish(FinishKind.ERROR, status=503, code="engine_dead", message="it broke")
    assert isinstance(waiting.error, Unavailable)
    assert waiting.error.code == "engine_dead"
    assert isinstance(asking.exception(), Unavailable)
    late = front.reads(_req())
    await settle()
    assert isinstance(late.error, Unavailable)
    assert front.manager.health() == (False, "it broke")
    assert (front.manager.status, front.manager.num_open) == ("dead", 0)


@scenario
async def test_row_86_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    front = Front()
    old = front.reads(_req(rid="old"))
    await settle()
    front.manager.begin_drain()
    new = front.reads(_req())
    await settle()
    assert isinstance(new.error, Unavailable)
    assert new.error.code == "shutting_down"
    front.output("old", 65, first=True, finish=LENGTH)
    await settle()
    assert (old.text, old.chunks[-1].finish) == ("A", LENGTH)
    assert front.manager.health() == (True, "draining")


@scenario
async def test_row_86_what_was_paused_can_be_told_to_go_on_while_the_server_drains() -> None:
    front = Front()
    front.manager.begin_drain()
    going_on = asyncio.create_task(front.manager.control.resume())
    await settle()
    (asked,) = (m for m in front.sent if isinstance(m, PauseReq))
    assert not asked.paused
    front.manager.handle(GetStateReqOutput(asked.req_id, {"paused": False}))
    assert await going_on == {"paused": False}


@scenario
async def test_loading_refuses_with_a_hint_and_is_healthy() -> None:
    front = Front(ready=False)
    reader = front.reads(_req())
    await settle()
    assert isinstance(reader.error, Unavailable)
    assert (reader.error.code, reader.error.retry_after_s) == ("loading", 2.0)
    assert front.manager.health() == (True, "loading")
    front.manager.handle(READY)
    assert front.manager.status == "loading"  # the tokenizer is still missing
    front.manager.attach_model(all_bytes(), chat_template=None, served_names=("m",), sampling_defaults={})
    assert front.manager.status == "ready"


@scenario
async def test_row_89_health_follows_the_ticks() -> None:
    front = Front()
    front.clock.advance(15.0)
    front.manager.handle(HealthTick(1))
    front.clock.advance(15.0)
    assert front.manager.health() == (True, "ready")
    front.clock.advance(6.0)
    healthy, why = front.manager.health()
    assert not healthy
    assert "21 s" in why


@scenario
async def test_control_calls_are_answered_by_id() -> None:
    front = Front()
    flush, state = asyncio.create_task(front.manager.flush_cache(1.0)), asyncio.create_task(front.manager.get_state("state", pages=True))
    await settle()
    flush_id, state_id = front.sent[0].req_id, front.sent[1].req_id
    assert front.sent == [FlushCacheReq(flush_id, 1.0), GetStateReq(state_id, "state", {"pages": True})]
    front.manager.handle(GetStateReqOutput("unknown", {}))
    front.manager.handle(GetStateReqOutput(state_id, {"x": 1}))
    front.manager.handle(FlushCacheReqOutput(flush_id, True))
    assert await state == {"x": 1}
    assert (await flush).success


@scenario
async def test_row_49_nothing_is_left_after_many_requests() -> None:
    front = Front()
    for k in range(200):
        reader = front.reads(_req(rid=f"r{k}"))
        await settle()
        front.output(f"r{k}", 65, first=True)
        if k % 2:
            reader.task.cancel()
            await settle()
        front.output(f"r{k}", finish=LENGTH if k % 2 == 0 else Finish(FinishKind.ABORT))
        await settle()
    manager = front.manager
    assert manager.num_open == 0
    assert not manager._table._routes
    assert not manager._calls._waiting
    assert manager._detokenizer is not None
    assert manager._detokenizer.num_states == 0
