"""Who gives way to a much more important request that finds no row or no pages. The choice is pure; the caller releases the victims.

Victims come worst priority first, newest first among equals; the set is minimal: without any one of them the request would not fit. When even
all candidates together are not enough, nobody is touched. A victim can never preempt its preemptor back, so this ends.
Source: scheduler.md 2.4, failures A4 to A6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rootlet.scheduler.queue import Queues
from rootlet.scheduler.req import Req

PREEMPTIVE_POLICIES = frozenset({"fcfs", "lof"})
"""Under the other policies the order is about the cache or about tenants, and priority only orders the queue."""


def is_wanted(queues: Queues, gap: int) -> bool:
    """Could the most important request of the queue preempt anybody? O(running)."""
    best = queues.waiting[0].spec.priority if queues.waiting else 0
    return bool(queues.waiting) and any(best - holder.spec.priority > gap for holder in queues.holders())


def candidates(queues: Queues, req: Req, *, gap: int, spared: Collection[Req]) -> list[Req]:
    """Who may be taken for `req`, first victim first. `spared` are part of the step that is being made; who ends in flight frees itself."""
    found = [r for r in queues.holders() if req.spec.priority - r.spec.priority > gap and r not in spared and not r.ends_in_flight]
    return sorted(found, key=lambda r: (r.spec.priority, -r.spec.seq, r.rid))


def choose(able: Sequence[Req], enough: Callable[[Sequence[Req]], bool]) -> list[Req]:
    """The first candidates that are `enough` together (which must be monotone), without those that turn out not to be needed; [] if never."""
    taken: list[Req] = []
    for req in able:
        taken.append(req)
        if enough(taken):
            break
    else:
        return []
    for req in taken[-2::-1]:
        fewer = [r for r in taken if r is not req]
        if enough(fewer):
            taken = fewer
    return taken
