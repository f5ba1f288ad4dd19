"""The whole runtime on one thread, with an ear at every door: what was said between the rooms while a request was answered, in order.

The same app, front, scheduler, loop and executor as the server; only the channels are lists and the clock stands still, so a run is the same
every time. Does not print (`trace_doc.py` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rootlet.config.schema import RuntimeConfig
from rootlet.core.clock import VirtualClock
from rootlet.core.ids import CountingIds
from rootlet.core.step import Capacity, ControlOp, Executor, StepPlan, StepResult
from rootlet.engine.model_side import FrontModel, LoadedExecutor, build_scheduler, ready_message
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.ipc.codec import ToMain
from rootlet.ipc.messages import BatchTokenIDOutput, ToScheduler
from rootlet.scheduler import loop
from rootlet.scheduler.control import req_line
from rootlet.scheduler.scheduler import Scheduler, Sinks
from rootlet.server.app import build_app
from rootlet.server.inprocess import post_json

CHAT = "/v1/chat/completions"
MAX_TURNS = 10_000


@dataclass(frozen=True, slots=True)
class Step:
    """One step: plan and result, the request's line and its pages before the forward and after the commit (None = it is over)."""

    plan: StepPlan
    result: StepResult
    before: dict[str, Any]
    pages: list[int]
    after: dict[str, Any] | None


@dataclass(slots=True)
class Record:
    """What one request made happen. `tree`, `ledger`: as the request found them."""

    tree: str
    ledger: dict[str, int]
    sent: list[ToScheduler] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: list[BatchTokenIDOutput] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)


class RecordingExecutor:
    """Satisfies `Executor`: the real one, whose plan and result can be looked at."""

    def __init__(self, inner: Executor, on_submit: Callable[[StepPlan], None]) -> None:
        self._inner = inner
        self._on_submit = on_submit
        self.result: StepResult | None = None

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def submit(self, plan: StepPlan) -> None:
        self._on_submit(plan)
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        self.result = self._inner.collect()
        return self.result

    def control(self, op: ControlOp) -> dict[str, Any]:
        return self._inner.control(op)

    def close(self) -> None:
        self._inner.close()


class TracedRuntime:
    """One request at a time. `config` is resolved and has depth 1. Owns `loaded.executor` until `close`."""

    def __init__(self, config: RuntimeConfig, loaded: LoadedExecutor, front: FrontModel) -> None:
        self._clock = VirtualClock()
        self._to_scheduler: list[ToScheduler] = []
        self._to_main: list[ToMain] = []
        self._seen: tuple[StepPlan, dict[str, Any], list[int]] | None = None
        self._executor = RecordingExecutor(loaded.executor, self._on_submit)
        traced = LoadedExecutor(self._executor, loaded.eos_token_ids, loaded.memory_sum, loaded.info)
        sinks = Sinks(self._to_main.append, self._to_main.append)
        self.scheduler: Scheduler = build_scheduler(config, traced, sinks=sinks, clock=self._clock, check=True)
        self.manager = TokenizerManager(self._to_scheduler.append, config, clock=self._clock, ids=CountingIds())
        self.manager.attach_model(
            front.tokenizer, chat_template=front.chat_template, served_names=front.served_names, sampling_defaults=front.sampling_defaults
        )
        self.manager.handle(ready_message(self.scheduler, traced))
        self._app = build_app(self.manager, config, clock=self._clock)

    def tree(self) -> str:
        return self.scheduler.state.kv.cache.pretty()

    def ledger(self) -> dict[str, int]:
        """Pages by owner."""
        return self.scheduler.state.kv.ledger()

    def chat(self, body: dict[str, Any]) -> Record:
        """POST `body` to the chat route, and turn the loop until the reply is there. Raises AssertionError for a refused body."""
        record = Record(tree=self.tree(), ledger=self.ledger())
        asyncio.run(self._answer(body, record))
        return record

    def close(self) -> None:
        self.manager.close()
        self._executor.close()

    async def _answer(self, body: dict[str, Any], record: Record) -> None:
        reply = asyncio.create_task(post_json(self._app, CHAT, body))
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
            if reply.done():
                break
            self._turn(record)
        status, record.reply = await reply
        assert status == 200, record.reply

    def _turn(self, record: Record) -> None:
        """One turn of the scheduler's loop, and what it said to the front."""
        messages = [*self._to_scheduler]
        self._to_scheduler.clear()
        record.sent += messages
        loop.turn(self.scheduler, messages, 1)
        if self._seen is not None and self._executor.result is not None:
            plan, before, pages = self._seen
            live = self.scheduler.state.queues.by_rid.get(plan.rids[0])
            record.steps.append(Step(plan, self._executor.result, before, pages, req_line(live) if live else None))
        self._seen = self._executor.result = None
        for message in self._to_main:
            if isinstance(message, BatchTokenIDOutput):
                record.outputs.append(message)
            self.manager.handle(message)
        self._to_main.clear()

    def _on_submit(self, plan: StepPlan) -> None:
        req = self.scheduler.state.queues.by_rid[plan.rids[0]]
        kv = self.scheduler.state.kv
        num_pages = -(-req.kv.kv_allocated_len // kv.page_size)
        assert req.kv.row is not None, "a planned request holds a row"
        self._seen = (plan, req_line(req), kv.req_to_token.pages(req.kv.row, 0, num_pages).tolist())
