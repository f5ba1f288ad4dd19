"""What `vtc` and aging are worth: two tenants of whom one floods, and one cold request beside a stream of hot ones.

`python -m rootlet.bench.fairness`. The real scheduler on the hash LM with a virtual clock, so the numbers are the same on every machine. A step costs
`STEP_S` + `EXTEND_S` a prompt token computed + `ROW_S` a decode row, roughly a small model on a laptop; times are seconds of that clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import VirtualClock
from rootlet.core.hash_lm import HashLM, HashModel
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import Capacity
from rootlet.core.types import ForwardMode
from rootlet.ipc.messages import BatchTokenIDOutput, DetokSpec, TokenizedGenerateReqInput
from rootlet.scheduler.loop import turn
from rootlet.scheduler.scheduler import Scheduler, Sinks

STEP_S, EXTEND_S, ROW_S = 0.008, 0.0001, 0.0005
CAPACITY = Capacity(num_pages=4096, page_size=16, max_rows=64, max_context_len=4096, max_step_tokens=8192, vocab_size=64)
Arrival = tuple[float, TokenizedGenerateReqInput]


def request(rid: str, prompt: list[int], max_new: int, *, user: str | None = None) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new, seed=1, ignore_eos=True)
    packed = np.array(prompt, dtype="<i4").tobytes()
    return TokenizedGenerateReqInput(rid=rid, input_ids=packed, sampling=params, detok=DetokSpec(), stream=True, user=user)


def prompt_of(length: int, family: int) -> list[int]:
    return [(7 * i + 11 * family + i * i * (family % 13)) % 60 + 4 for i in range(length)]


def first_tokens(arrivals: list[Arrival], args: SchedulerArgs) -> dict[str, float]:
    """Seconds from each request's arrival to its first token."""
    clock, seen = VirtualClock(), dict[str, float]()
    came = {msg.rid: at for at, msg in arrivals}

    def collect(batch: BatchTokenIDOutput) -> None:
        for out in batch.outputs:
            seen.setdefault(out.rid, clock.now() - came[out.rid])

    executor = HashLM(CAPACITY, model=HashModel(vocab_size=CAPACITY.vocab_size))
    scheduler = Scheduler(
        executor=executor, scheduler_args=args, cache_args=CacheArgs(), eos_token_ids=(2,), clock=clock, sinks=Sinks(collect, lambda message: None)
    )
    waiting = sorted(arrivals, key=lambda a: a[0])[::-1]
    while waiting or not scheduler.idle:
        messages = []
        while waiting and waiting[-1][0] <= clock.now():
            messages.append(waiting.pop()[1])
        step = scheduler.state.step
        turn(scheduler, messages, 1)
        clock.advance(_cost_s(scheduler) if scheduler.state.step > step else 0.001)
    return seen


def _cost_s(scheduler: Scheduler) -> float:
    plan = scheduler.state.plan_log[-1]
    if plan.mode is ForwardMode.DECODE:
        return STEP_S + ROW_S * plan.num_rows
    return STEP_S + EXTEND_S * plan.num_tokens


def two_tenants() -> list[Arrival]:
    """One sends 300 requests at once; the other one a second, 20 in all."""
    flood = [(0.0, request(f"flood{i}", prompt_of(200, i), 32, user="flood")) for i in range(300)]
    return flood + [(1.0 + i, request(f"calm{i}", prompt_of(200, 500 + i), 32, user="calm")) for i in range(20)]


def one_cold() -> list[Arrival]:
    """60 requests that share 256 tokens, 30 more each second for 25 s, which is about what is served; one that shares nothing comes after 2 s."""
    hot = prompt_of(256, 3)
    stream = [(max(0.0, (i - 60) / 30), request(f"hot{i}", [*hot, 5 + i % 50, 5 + i // 50], 24)) for i in range(810)]
    return [*stream, (2.0, request("cold", prompt_of(400, 9), 24))]


def table(title: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _percentiles(times: dict[str, float], who: Callable[[str], bool]) -> str:
    found = [s for rid, s in times.items() if who(rid)]
    return f"{np.percentile(found, 50):.2f} / {np.percentile(found, 95):.2f}"


def main() -> None:
    """Both experiments as tables."""
    base = SchedulerArgs(max_running=8, max_queue=10_000)

    def tenants() -> Iterator[tuple[str, ...]]:
        for policy in ("fcfs", "lpm", "shortest-prefill-first", "hrrn", "vtc"):
            times = first_tokens(two_tenants(), replace(base, schedule_policy=policy))
            yield policy, _percentiles(times, lambda r: r.startswith("calm")), _percentiles(times, lambda r: r.startswith("flood"))

    def aging() -> Iterator[tuple[str, ...]]:
        for policy, value in (("fcfs", 64), ("lpm", 0), ("lpm", 16), ("lpm", 64), ("lpm", 256), ("dfs-weight", 0), ("dfs-weight", 64)):
            times = first_tokens(one_cold(), replace(base, schedule_policy=policy, aging=value))
            yield policy, str(value), f"{times['cold']:.2f}", _percentiles(times, lambda r: r.startswith("hot"))

    table("Two tenants, one flooding: seconds to the first token, p50 / p95", ("policy", "calm tenant", "flooding tenant"), tenants())
    table("One cold request beside a hot stream", ("policy", "aging", "cold request, s", "stream, p50 / p95"), aging())


if __name__ == "__main__":
    main()
