"""In which order the waiting queue is walked. A policy is one pure function `order(waiting, ctx)`; ties always fall to arrival, then rid.

`waiting` comes in arrival order (priority first). Adding a policy: one function and its registry line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootlet.core.registry import Registry
from rootlet.scheduler.in_batch_prefix import InBatchPrefix
from rootlet.scheduler.queue import arrival_key
from rootlet.scheduler.req import Req

LPM_QUEUE_LIMIT = 128
"""Matching costs a tree walk a request: beyond this queue length lpm behaves as fcfs."""

AGING_LEN = 64
"""Tokens of match that each pass of waiting is worth, so that a request without any match is not starved by hot prefixes."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """`probe` = tokens of a request that the cache holds now (read-only)."""

    page_size: int
    cache_enabled: bool
    probe: Callable[[Req], int]


SchedulePolicy = Callable[[Sequence[Req], PolicyContext], list[Req]]

POLICIES: Registry[SchedulePolicy] = Registry("schedule policy")


@POLICIES.register("fcfs")
def fcfs(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """First come, first served, within equal priority."""
    return list(waiting)


@POLICIES.register("lpm")
def lpm(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Longest prefix match first (aged), families' followers last. O(queue) walks; fcfs above `LPM_QUEUE_LIMIT` or without a cache."""
    if len(waiting) > LPM_QUEUE_LIMIT or not ctx.cache_enabled:
        return list(waiting)
    families = InBatchPrefix(ctx.page_size)
    scored: list[tuple[bool, int, Req]] = []
    for req in waiting:
        match_len = ctx.probe(req)
        scored.append((families.deprioritise(req, match_len), match_len + AGING_LEN * req.times.num_passes, req))
    scored.sort(key=lambda s: (-s[2].spec.priority, s[0], -s[1], arrival_key(s[2])))
    return [s[2] for s in scored]
