"""Runs a workload through the real scheduler and cache, over an executor, and measures what its clients would see.

Two kinds of run. Measured: the real executor, the system clock. Modelled: an executor that answers at once and moves a virtual clock by what the
step would have cost, from a fit of measured steps (`StepCosts`): for page sizes that the native kernels do not take. What is cached, computed,
retracted and held is decided by the same scheduler either way; only seconds are modelled.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rootlet.bench.instant import InstantExecutor, request
from rootlet.bench.policy_workloads import PolicyWorkload
from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import Clock, SystemClock, VirtualClock
from rootlet.core.step import Capacity, ControlOp, Executor, StepPlan, StepResult
from rootlet.ipc.messages import BatchTokenIDOutput
from rootlet.scheduler.loop import turn
from rootlet.scheduler.scheduler import Scheduler, Sinks


@dataclass(frozen=True, slots=True)
class Setup:
    policy: str
    cache: bool
    page_size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens, seconds from arrival, seconds between tokens, shares of the pool that running requests hold, counts."""

    cached_len: int
    computed_len: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    kv_mean: float
    kv_peak: float
    retractions: int
    total_s: float

    def ttft(self, percent: float) -> float:
        return float(np.percentile(self.ttft_s, percent))

    @property
    def tpot(self) -> float:
        return statistics.median(self.tpot_s)


def features(plan: StepPlan) -> tuple[float, ...]:
    """What the time of a step depends on: 1 for the step, prompt tokens, pairs of prompt tokens and what they see, decode rows, what those see."""
    extend = plan.extend_lens > 1
    prompt, before = plan.extend_lens[extend].astype(float), plan.prefix_lens[extend].astype(float)
    seen = plan.seq_lens[~extend].astype(float)
    return 1.0, float(prompt.sum()), float((prompt * (before + prompt / 2)).sum()), float(len(seen)), float(seen.sum())


@dataclass(slots=True)
class StepCosts:
    """Measured steps, and the least-squares fit of their seconds with no negative price."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    _prices: list[float] = field(default_factory=list)

    def add(self, plan: StepPlan, seconds: float) -> None:
        self.rows.append(features(plan))
        self.seconds.append(seconds)
        self._prices.clear()

    def of(self, plan: StepPlan) -> float:
        """Seconds of a step, as fitted."""
        self._prices = self._prices or self.fit()
        return float(np.dot(self._prices, features(plan)))

    def fit(self) -> list[float]:
        """A price a feature. Relative errors count, so that short steps are not drowned by long ones; what would be negative is free."""
        x, y = np.array(self.rows), np.array(self.seconds)
        used = list(range(x.shape[1]))
        while used:
            prices = np.linalg.lstsq(x[:, used] / y[:, None], np.ones(len(y)), rcond=None)[0]
            if (prices >= 0).all():
                return [float(prices[used.index(i)]) if i in used else 0.0 for i in range(x.shape[1])]
            used.pop(int(prices.argmin()))
        return [0.0] * x.shape[1]


class SmallerPool:
    """`Executor`: another one, of which only part of the pool is used, so that one loaded model serves pools of any size."""

    def __init__(self, inner: Executor, pool_len: int) -> None:
        self._inner = inner
        capacity = inner.capacity
        assert pool_len <= capacity.pool_len, f"a pool of {pool_len} tokens, the executor has {capacity.pool_len}"
        self._capacity = replace(capacity, num_pages=pool_len // capacity.page_size)

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def control(self, op: ControlOp) -> dict[str, Any]:
        return self._inner.control(op)

    def close(self) -> None:
        """The inner executor goes on."""


class ModelledExecutor(InstantExecutor):
    """Answers at once, on a clock that it moves by the cost of the step."""

    def __init__(self, capacity: Capacity, clock: VirtualClock, costs: StepCosts) -> None:
        super().__init__(capacity)
        self._clock = clock
        self._costs = costs

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self._clock.advance(self._costs.of(plan))


def run(work: PolicyWorkload, setup: Setup, executor: Executor, clock: Clock, *, costs: StepCosts | None = None) -> Outcome:
    """All jobs at once, until the last has its tokens. `costs` is told each step and the seconds of its turn, planning and committing included."""
    stamps: dict[str, list[float]] = {}

    def collect(batch: BatchTokenIDOutput) -> None:
        for out in batch.outputs:
            stamps.setdefault(out.rid, []).extend([clock.now()] * len(out.token_ids))

    scheduler = Scheduler(
        executor=executor,
        scheduler_args=SchedulerArgs(
            schedule_policy=setup.policy, max_running=work.max_running, chunked_prefill=work.chunk_len, conservativeness=work.conservativeness
        ),
        cache_args=CacheArgs(page_size=setup.page_size, prefix_cache=setup.cache),
        eos_token_ids=(),
        clock=clock,
        sinks=Sinks(collect, lambda message: None),
    )
    begin_s, held = clock.now(), list[float]()
    messages = [request(f"r{i}", np.array(job.ids), job.max_new) for i, job in enumerate(work.jobs)]
    pool, pages = scheduler.state.kv.cache, executor.capacity.num_pages
    while messages or not scheduler.idle:
        step, turned_s = scheduler.state.step, clock.now()
        turn(scheduler, messages, 1)
        if costs is not None and scheduler.state.step > step:
            costs.add(scheduler.state.plan_log[-1], clock.now() - turned_s)
        messages = []
        held.append(1.0 - pool.available_pages / pages)
    counters = scheduler.state.counters
    drawn = [len(stamps[f"r{i}"]) for i in range(len(work.jobs))]
    assert drawn == [job.max_new for job in work.jobs], "everybody got all tokens"
    return Outcome(
        cached_len=counters.cached_tokens,
        computed_len=counters.prefilled_tokens,
        ttft_s=tuple(times[0] - begin_s for times in stamps.values()),
        tpot_s=tuple((times[-1] - times[0]) / (len(times) - 1) for times in stamps.values() if len(times) > 1),
        kv_mean=statistics.fmean(held),
        kv_peak=max(held),
        retractions=counters.retractions,
        total_s=clock.now() - begin_s,
    )


def measured(work: PolicyWorkload, setup: Setup, executor: Executor, costs: StepCosts) -> Outcome:
    return run(work, setup, SmallerPool(executor, work.pool_len), SystemClock(), costs=costs)


def modelled(work: PolicyWorkload, setup: Setup, like: Capacity, costs: StepCosts) -> Outcome:
    """`like`: the capacity of the executor that was measured."""
    clock = VirtualClock()
    capacity = replace(like, page_size=setup.page_size, num_pages=work.pool_len // setup.page_size)
    return run(work, setup, ModelledExecutor(capacity, clock, costs), clock)


def off_by(real: Sequence[Outcome], model: Sequence[Outcome]) -> float:
    """Median relative error of the modelled median time to the first token."""
    return statistics.median(abs(m.ttft(50) / r.ttft(50) - 1.0) for r, m in zip(real, model, strict=True))
