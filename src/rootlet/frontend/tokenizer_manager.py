"""`TokenizerManager`: the front of the engine. Text to tokens, one `ReqState` a request, chunks back to whoever reads them.

Asyncio, one loop, no locks: every method but the tokenizing of long texts runs on the loop that reads the results. Used by all dialects of the
server and by the Python API. Does not render templates, does not parse dialects, does not touch sockets (it is given `send`).

    generate -> check -> tokenize -> clamp -> send ...   handle(BatchStrOutput) -> ReqState -> chunk
    reader leaves -> AbortReq at once; the state stays until the scheduler's echo
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, Protocol

from rootlet.config.schema import RuntimeConfig
from rootlet.core.clock import Clock, SystemClock
from rootlet.core.errors import Unavailable
from rootlet.core.ids import IdSource, RandomIds
from rootlet.core.log import logger
from rootlet.core.types import Finish, FinishKind
from rootlet.frontend.admission import check_prompt, check_request, check_text, left_neighbour, max_open, refusal_of, wire_requests
from rootlet.frontend.detokenize import TokenBytes
from rootlet.frontend.detokenizer_manager import DetokenizerManager
from rootlet.frontend.engine_control import EngineControl
from rootlet.frontend.pending_calls import PendingCalls
from rootlet.frontend.req_state import ChoiceState, ReqState
from rootlet.frontend.req_table import ReqTable
from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.ipc.codec import ToMain
from rootlet.ipc.messages import (
    AbortReq,
    BatchStrOutput,
    BatchTokenIDOutput,
    FlushCacheReq,
    FlushCacheReqOutput,
    GetStateReq,
    GetStateReqOutput,
    HealthTick,
    LoadProgress,
    SchedulerError,
    SchedulerReady,
    StopReq,
    StrOutput,
    ToScheduler,
)

INLINE_CHARS = 4000  # texts up to here are tokenized on the loop (about a millisecond); longer ones in a thread
STALE_TICK_S = 20.0  # a scheduler that sent no tick for so long is reported as stuck (unless `liveness` knows better)
CALL_GRACE_S = 10.0

Status = Literal["loading", "ready", "draining", "dead"]

_log = logger("frontend")


class TextTokenizer(TokenBytes, Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...
    def min_tokens(self, text: str) -> int: ...


class TokenizerManager:
    """`send` never blocks. `liveness` answers (alive, why not) for a loaded engine; default: the age of the last tick.

    Read by the dialects: `tokenizer`, `chat_template`, `served_names`, `status`, `progress`, `ready_info`, `sampling_defaults`.
    """

    def __init__(
        self,
        send: Callable[[ToScheduler], None],
        config: RuntimeConfig,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        liveness: Callable[[], tuple[bool, str]] | None = None,
    ) -> None:
        self.tokenizer: Any = None
        self.chat_template: Any = None
        self.served_names: tuple[str, ...] = ()
        self.sampling_defaults: dict[str, Any] = {}
        self.progress: LoadProgress | None = None
        self.ready_info: SchedulerReady | None = None
        self._tick_s = 0.0
        self.status: Status = "loading"
        self._send = send
        self._config = config
        self._clock = clock or SystemClock()
        self._liveness = liveness
        self._detokenizer: DetokenizerManager | None = None
        self._table = ReqTable(self._clock, ids or RandomIds())
        self._calls = PendingCalls(ids or RandomIds())
        self.control = EngineControl(send, self._calls, partial(self._check_open, new=False))
        self._death = "the engine is not running"
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    # -- life -------------------------------------------------------------------------------------------------------------------

    def attach_model(self, tokenizer: TextTokenizer, *, chat_template: Any, served_names: tuple[str, ...], sampling_defaults: dict[str, Any]) -> None:
        """The text side of the model is loaded. Ready once the scheduler is too."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.served_names = served_names
        self.sampling_defaults = sampling_defaults
        self._detokenizer = DetokenizerManager(tokenizer)
        self._become_ready()

    def _become_ready(self) -> None:
        if self.status == "loading" and self.tokenizer is not None and self.ready_info is not None:
            self.status = "ready"

    def begin_drain(self) -> None:
        """Refuse new requests (503 shutting_down); those inside go on."""
        if self.status != "dead":
            self.status = "draining"

    def engine_failed(self, message: str) -> None:
        """The engine is gone: every open request ends now with 503 engine_dead, and so does every later one. The first reason stays."""
        if self.status == "dead":
            return
        self.status = "dead"
        self._death = message
        self._table.end_all(Finish(FinishKind.ERROR, status=Unavailable.status, code="engine_dead", message=message))
        self._calls.fail(Unavailable(message, code="engine_dead"))

    def abort_open(self, message: str) -> None:
        """Shutdown ran out of time: what is still open ends as aborted, without waiting for the scheduler."""
        self._table.end_all(Finish(FinishKind.ABORT, status=Unavailable.status, code="shutting_down", message=message))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def num_open(self) -> int:
        """Requests in the table, those whose abort is on its way included; 0 when idle."""
        return len(self._table)

    def health(self) -> tuple[bool, str]:
        """Is the process worth keeping? Never needs a generation; true while loading, busy or draining."""
        if self.status == "dead":
            return False, self._death
        if self.ready_info is None:
            return True, self.status
        age_s = self._clock.now() - self._tick_s
        alive, why = self._liveness() if self._liveness else (age_s <= STALE_TICK_S, f"no sign of life from the scheduler for {age_s:.0f} s")
        return (True, self.status) if alive else (False, why)

    def _check_open(self, *, new: bool = True) -> SchedulerReady:
        """`new`: for a new request. What operators ask goes on while the server drains: what was paused can only finish once it is told to go on."""
        if self.status == "dead":
            raise Unavailable(self._death, code="engine_dead")
        if self.status == "draining" and new:
            raise Unavailable("the server is shutting down", code="shutting_down", retry_after_s=5.0)
        if self.status == "loading" or self.ready_info is None:
            phase = f" ({self.progress.phase})" if self.progress else ""
            raise Unavailable(f"the model is loading{phase}", code="loading", retry_after_s=2.0)
        return self.ready_info

    # -- requests ---------------------------------------------------------------------------------------------------------------

    async def generate(self, req: GenerateReq) -> AsyncIterator[GenerateChunk]:
        """Chunks of all choices as they come, merged while the reader is slow; ends after the terminal chunk of each choice.

        Raises before the first chunk: InvalidValue, ContextOverflow, PoolOverflow, QueueFull, DeadlineExceeded, Unavailable. Later failures
        are chunks with a finish of kind ERROR or ABORT. Closing or cancelling aborts every choice at once.
        """
        ready = self._check_open()
        server, max_queue = self._config.server, self._config.scheduler.max_queue
        check_request(req, ready, max_n=server.max_n, max_queue=max_queue, max_logprobs=server.max_logprobs)
        state = self._table.add(req, max_open=max_open(ready, max_queue))
        try:
            await self._dispatch(state, req)
            started = False
            while not state.all_taken:
                await state.changed.wait()
                refusal = None if started else refusal_of(state, param=req.param, retry_after_s=self._table.retry_after_s())
                if refusal is not None:
                    raise refusal
                for chunk in state.take():
                    started = True
                    yield chunk
        finally:
            self._leave(state)

    def abort(self, rid: str | None, *, abort_all: bool = False) -> None:
        """End one request (exact rid, all its choices), those of a batch (exact id), or all. Unknown: no-op."""
        for state in self._table.all() if abort_all else self._table.named(rid) if rid else []:
            self._abort_state(state, "aborted on request")

    def _abort_state(self, state: ReqState, reason: str) -> None:
        if not state.dispatched:
            state.abort_reason = reason
            return
        for choice in state.open_choices:
            self._send(AbortReq(choice.wire_rid, reason=reason))

    async def _dispatch(self, state: ReqState, req: GenerateReq) -> None:
        if req.input_ids is None:
            check_text(req.param, req.prompt or "", self.tokenizer, self._check_open())
        input_ids = req.input_ids if req.input_ids is not None else await _tokenize(self.tokenizer, req, self._threads)
        ready = self._check_open()  # tokenizing may have taken a while
        check_prompt(req, input_ids, ready)
        if state.abort_reason is not None:
            state.end_all(Finish(FinishKind.ABORT, message=state.abort_reason))
            return
        tail = left_neighbour(self.tokenizer, input_ids, skip_special_tokens=req.sampling.skip_special_tokens)
        wire_rids = [choice.wire_rid for choice in state.choices]
        messages = wire_requests(req, input_ids, wire_rids=wire_rids, seed=state.choices[0].seed, prompt_tail=tail, ready=ready)
        state.dispatched = True
        for choice, message in zip(state.choices, messages, strict=True):
            choice.prompt_len = len(input_ids)
            self._send(message)

    def _leave(self, state: ReqState) -> None:
        """The reader is done or gone. What the scheduler still runs is aborted now; its echo removes the state."""
        state.detached = True
        if state.dispatched and state.open_choices:
            self._abort_state(state, "the client went away")
        else:
            self._table.forget(state)

    # -- engine to front --------------------------------------------------------------------------------------------------------

    def handle(self, message: ToMain) -> None:
        """One message from the scheduler or the detokenizer. Never raises for a rid that is gone."""
        match message:
            case BatchTokenIDOutput():
                assert self._detokenizer is not None, "outputs before the tokenizer is attached"
                texts = self._detokenizer.handle(message)
                if texts is not None:
                    self._deliver(texts)
            case BatchStrOutput():
                self._deliver(message)
            case HealthTick():
                self._tick_s = self._clock.now()
            case LoadProgress():
                self.progress = message
            case SchedulerReady():
                self.ready_info = message
                self._tick_s = self._clock.now()
                self._become_ready()
            case FlushCacheReqOutput() | GetStateReqOutput():
                self._calls.answer(message.req_id, message)
            case SchedulerError():
                self.engine_failed(message.message)

    def _deliver(self, batch: BatchStrOutput) -> None:
        now_s = self._clock.now()
        for out in batch.outputs:
            route = self._table.route(out.rid)
            if route is None:
                continue
            state, choice = route
            choice.add(out, now_s)
            state.changed.set()
            if choice.finish is not None:
                self._finished(state, choice, out)

    def _finished(self, state: ReqState, choice: ChoiceState, out: StrOutput) -> None:
        self._table.finished(choice)
        if choice.finish is not None and isinstance(choice.finish.matched, str):
            self._send(StopReq(out.rid, keep_len=out.completion_len, matched=choice.finish.matched))
        if state.detached and not state.open_choices:
            self._table.forget(state)

    # -- control ----------------------------------------------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float) -> FlushCacheReqOutput:
        """Forget every cached prefix once idle, within `timeout_s`. Raises `Unavailable`."""
        self._check_open(new=False)
        answer = await self._calls.call(lambda req_id: self._send(FlushCacheReq(req_id, timeout_s)), timeout_s + CALL_GRACE_S)
        assert isinstance(answer, FlushCacheReqOutput)
        return answer

    async def get_state(self, what: str, **args: Any) -> dict[str, Any]:
        """The scheduler's view: "info", "state" or "metrics". Raises `Unavailable`."""
        self._check_open(new=False)
        answer = await self._calls.call(lambda req_id: self._send(GetStateReq(req_id, what, args)), CALL_GRACE_S)
        assert isinstance(answer, GetStateReqOutput)
        return answer.state


async def _tokenize(tokenizer: TextTokenizer, req: GenerateReq, threads: ThreadPoolExecutor) -> Sequence[int]:
    """Ids of the prompt's text; a long one is tokenized in `threads`, so that the loop goes on."""
    text = req.prompt or ""
    encode = partial(tokenizer.encode, text, add_special_tokens=req.add_special_tokens)
    if len(text) <= INLINE_CHARS:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(threads, encode)
