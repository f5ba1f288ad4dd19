"""Ticks of the real scheduler to measure: plan and commit of a decode step, and an admission pass over a long queue.

The executor costs nothing (`InstantExecutor`), and what it costs all the same is left out by reading the clock around the plan and around the commit
only: planning is `on_tick` and `get_next_batch_to_run`, committing is `process_batch_result`. Nobody reads the outputs, but they are made:
every request streams. Times here are CPU time of the thread: other work on the machine counts for less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from rootlet.bench.instant import InstantExecutor, request
from rootlet.bench.pace import Measure, Operation, times_us
from rootlet.bench.radix_baseline import BaselineRadixCache, BaselineReq, order_by_lpm
from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import VirtualClock
from rootlet.core.step import Capacity
from rootlet.core.types import ForwardMode
from rootlet.scheduler.loop import turn
from rootlet.scheduler.policies import PolicyContext
from rootlet.scheduler.policies.prefix import lpm, score
from rootlet.scheduler.req import Req
from rootlet.scheduler.scheduler import Scheduler, Sinks

BATCHES = {1: 40, 16: 120, 64: 400, 256: 1500}
TICKS, MAX_NEW = 60, 4_000
PAGE, VOCAB = 16, 50_000
QUEUE, FAMILIES, SHARED_LEN, OWN_LEN = 1_000, 50, 512, 64
PASSES, ORDERS = 20, 5


def operations() -> Iterator[Operation]:
    for batch, target_us in BATCHES.items():
        yield Operation(f"decode tick, batch {batch}", target_us, _decode_ticks(batch))
    queue = Queue.build("lpm")
    yield Operation(f"admission pass, {QUEUE} waiting, lpm", 3_000, queue.pass_us)
    yield Operation("order 128 waiting, lpm", None, queue.order_us(lpm, 128), queue.baseline_us(128))
    yield Operation(f"match each of {QUEUE} waiting", None, queue.order_us(score, QUEUE), queue.baseline_us(QUEUE))


def _scheduler(args: SchedulerArgs, *, num_pages: int) -> Scheduler:
    capacity = Capacity(num_pages=num_pages, page_size=PAGE, max_rows=512, max_context_len=8192, max_step_tokens=65_536, vocab_size=VOCAB)
    return Scheduler(
        executor=InstantExecutor(capacity),
        scheduler_args=args,
        cache_args=CacheArgs(),
        eos_token_ids=(2,),
        clock=VirtualClock(),
        sinks=Sinks(lambda batch: None, lambda message: None),
    )


def _decode_ticks(batch: int) -> Measure:
    """`batch` rows at contexts from 64 tokens on, of different lengths, so that in each tick a sixteenth of them takes a page."""
    rng = np.random.default_rng(batch)
    scheduler = _scheduler(SchedulerArgs(max_running=batch, chunked_prefill=0, max_prefill=65_536), num_pages=batch * 300)
    for i in range(batch):
        scheduler.handle(request(f"r{i}", rng.integers(4, VOCAB, size=64 + i % 53), MAX_NEW))
    while len(scheduler.state.queues.decode) < batch:
        turn(scheduler, [], 1)

    def ticks() -> list[float]:
        return [_tick_us(scheduler, batch) for _ in range(TICKS)]

    return ticks


def _tick_us(scheduler: Scheduler, batch: int) -> float:
    begin = time.thread_time()
    scheduler.on_tick()
    plan = scheduler.get_next_batch_to_run()
    planned = time.thread_time()
    assert plan is not None, "there is always something to decode"
    assert plan.mode is ForwardMode.DECODE, "nothing else to do"
    assert plan.num_rows == batch, "everybody decodes"
    scheduler.executor.submit(plan)
    result = scheduler.executor.collect()
    collected = time.thread_time()
    scheduler.process_batch_result(result)
    return 1e6 * (planned - begin + time.thread_time() - collected)


@dataclass(slots=True)
class Queue:
    """`QUEUE` waiting requests of `FAMILIES` families, whose shared beginnings of 512 tokens are cached, and a tail of their own of 64. What a pass
    admits is served and replaced outside the clock, so each pass sees as many."""

    scheduler: Scheduler
    heads: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    rng: np.random.Generator
    numbers: count[int]

    @classmethod
    def build(cls, policy: str) -> Queue:
        rng = np.random.default_rng(7)
        args = SchedulerArgs(schedule_policy=policy, max_queue=2 * QUEUE)
        queue = cls(_scheduler(args, num_pages=20_000), rng.integers(4, VOCAB, size=(FAMILIES, SHARED_LEN)), rng, count())
        for head in queue.heads:
            queue.scheduler.handle(request(f"head{next(queue.numbers)}", head, 1))
        while not queue.scheduler.idle:
            turn(queue.scheduler, [], 1)
        queue.fill()
        return queue

    def fill(self) -> None:
        waiting = self.scheduler.state.queues.waiting
        while len(waiting) < QUEUE:
            number = next(self.numbers)
            self.scheduler.handle(request(f"r{number}", np.concatenate([self.heads[number % FAMILIES], self._tail()]), 1))

    def _tail(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self.rng.integers(4, VOCAB, size=OWN_LEN)

    def pass_us(self) -> list[float]:
        """Order the queue, match and admit while the chunk budget lasts, make the plan."""
        times = []
        for _ in range(PASSES):
            begin = time.thread_time()
            self.scheduler.on_tick()
            plan = self.scheduler.get_next_batch_to_run()
            times.append(1e6 * (time.thread_time() - begin))
            assert plan is not None, "the head of the queue always fits"
            assert plan.mode is ForwardMode.EXTEND, "they end with their prompt"
            self.scheduler.executor.submit(plan)
            self.scheduler.process_batch_result(self.scheduler.executor.collect())
            self.fill()
        return times

    def order_us(self, order: Callable[[Sequence[Req], PolicyContext], object], length: int) -> Measure:
        """The ordering alone, over the first `length` waiting."""
        kv = self.scheduler.state.kv
        context = PolicyContext(page_size=kv.page_size, cache_enabled=True, probe=kv.probe)

        def measure() -> list[float]:
            waiting = self.scheduler.state.queues.waiting[:length]
            return times_us(lambda: order(waiting, context), ORDERS, clock=time.thread_time)

        return measure

    def baseline_us(self, length: int) -> Measure:
        """The baseline's ordering of as many requests of the same families, each matched, in the same kind of tree."""
        cache = BaselineRadixCache(PAGE)
        for head in self.heads:
            cache.insert(head.tolist(), np.zeros(SHARED_LEN, dtype=np.int64))
        ids = [np.concatenate([self.heads[i % FAMILIES], self._tail()]).tolist() for i in range(length)]
        waiting = [BaselineReq(each, np.zeros(0, dtype=np.int64), cache.root) for each in ids]
        return lambda: times_us(lambda: order_by_lpm(waiting, cache, limit=length), ORDERS, clock=time.thread_time)
