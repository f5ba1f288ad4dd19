"""In which order the waiting queue is walked: what a policy is, the registry, and the policies that do not look at the cache.

A policy is one function `order(waiting, ctx)` that changes nothing (`random` draws from the generator it is given). `waiting` comes in arrival
order, larger priority first; ties always fall back to that. Adding a policy: one function and its registry line, in a file of this package.

No policy starves anybody of equal priority. How often can one request be overtaken by later ones, counted in passes that admitted somebody
(`ReqTimes.num_passes`), with `ctx.aging_len` = a > 0 (0 switches all of it off)?

    fcfs                       never
    lpm                        ceil(L / a), L = the longest match in the cache          each pass counts as a more matched tokens
    shortest-prefill-first     ceil(L / a), L = its own prefill length                  each pass counts as a fewer tokens to compute
    lof                        ceil(L / a), L = the largest max_new around              each pass counts as a more tokens to draw
    dfs-weight, random, routing-key       `OVERDUE_PASSES`: then it goes first, in order of arrival
    hrrn                       by whom has not waited longer in proportion to its length: not at all by requests as long as itself
    vtc                        until its tenant has been served as much as each other one (fairness.py); inside a tenant as lpm
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rootlet.core.registry import Registry
from rootlet.scheduler.queue import Queues, arrival_key
from rootlet.scheduler.req import Req

MATCHED_QUEUE_LIMIT = 128
"""Matching costs a tree walk a request: beyond this queue length lpm and hrrn behave as fcfs in that pass."""

SCORED_LIMIT = 256
"""dfs-weight and shortest-prefill-first look at so many requests, the first to come; later ones follow by arrival. Bounds a pass to milliseconds."""

OVERDUE_PASSES = 64

RANDOM_SEED = 20250


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at. `probe` = tokens of a request that the cache holds now (read-only); `prefilled` = tokens that all prefills
    together have computed since the start, the clock of hrrn; `aging_len` as above."""

    page_size: int
    cache_enabled: bool
    probe: Callable[[Req], int]
    aging_len: int = 64
    prefilled: Callable[[], int] = lambda: 0
    queues: Queues = field(default_factory=Queues)
    rng: random.Random = field(default_factory=lambda: random.Random(RANDOM_SEED))

    def age(self, req: Req) -> int:
        """What its waiting is worth, in tokens."""
        return self.aging_len * req.times.num_passes


SchedulePolicy = Callable[[Sequence[Req], PolicyContext], list[Req]]

POLICIES: Registry[SchedulePolicy] = Registry("schedule policy")


ChunkLeave = Callable[[Req, PolicyContext], int]
"""How many tokens of a step an unfinished chunk should leave to the waiting ones."""

LEAVES: dict[str, ChunkLeave] = {}


def leave_nothing(req: Req, ctx: PolicyContext) -> int:
    """A chunk takes what there is: every policy without an entry in `LEAVES`."""
    return 0


def by_priority(reqs: Iterable[Req]) -> list[Req]:
    """Larger priority first; the given order among equals."""
    return sorted(reqs, key=lambda r: -r.spec.priority)


def overdue_first(reqs: Iterable[Req], ctx: PolicyContext) -> list[Req]:
    """Those that were passed over `OVERDUE_PASSES` times first, by arrival; then the others as given. Priority before both."""
    late: list[Req] = []
    rest: list[Req] = []
    for req in reqs:
        (late if ctx.aging_len and req.times.num_passes >= OVERDUE_PASSES else rest).append(req)
    return by_priority(sorted(late, key=arrival_key) + rest)


@POLICIES.register("fcfs")
def fcfs(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """First come, first served, within equal priority."""
    return list(waiting)


@POLICIES.register("lof")
def lof(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Longest output first (aged): long decodes start early, so that the batch does not end with one of them alone."""
    return sorted(waiting, key=lambda r: (-r.spec.priority, -(r.spec.max_new + ctx.age(r)), arrival_key(r)))


@POLICIES.register("random")
def shuffled(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Any order, from a seeded generator: for comparisons. The same script gives the same order."""
    order = list(waiting)
    ctx.rng.shuffle(order)
    return overdue_first(order, ctx)


@POLICIES.register("routing-key")
def routing_key(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Requests whose routing key is the most frequent among the running ones first, ties by key; others, and those without a key, last."""
    running = Counter(r.spec.routing_key for r in ctx.queues.holders() if r.spec.routing_key)

    def rank(req: Req) -> tuple[int, str]:
        key = req.spec.routing_key or ""
        count = running.get(key, 0)
        return (-count, key if count else "")

    return overdue_first(sorted(waiting, key=rank), ctx)
