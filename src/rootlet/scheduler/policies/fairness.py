"""`vtc`: tenants are served alike, however many requests one of them sends; inside a tenant the cached prefix decides, as under lpm.

Each tenant (the `user` of a request; those without one are a tenant together) has a virtual counter of what it was served: a token of prefill
that had to be computed counts 1, a token drawn counts `DRAWN_WEIGHT`. Cached tokens are free, and so is what a retraction computes again. Next is
always the tenant with the smallest counter. A tenant that was away starts from the smallest counter of those who are here, so nobody saves up
credit; one that was served much and left comes back with its debt.

Bound: while two tenants both have requests waiting, their counters differ by at most what one admission pass plus the requests that run at that
moment can add; so whoever floods delays another tenant by the rows in use and not by the flood. Priority counts inside a tenant only.
Source: "Fairness in Serving Large Language Models" (Sheng et al., 2024), virtual token counter.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rootlet.scheduler.policies.base import POLICIES, PolicyContext
from rootlet.scheduler.policies.prefix import lpm
from rootlet.scheduler.queue import arrival_key
from rootlet.scheduler.req import Req, Tenant

DRAWN_WEIGHT = 2
MAX_REMEMBERED = 4096
"""Tenants without a live request whose debt is remembered."""


@dataclass(slots=True)
class Tenants:
    """Who is here and what they were served. Bounded by the live requests and `MAX_REMEMBERED`."""

    _table: dict[str | None, Tenant]

    @classmethod
    def empty(cls) -> Tenants:
        return cls({})

    def enter(self, name: str | None) -> Tenant:
        """One more live request of `name`."""
        tenant = self._table.setdefault(name, Tenant(name))
        if tenant.num_live == 0:
            here = [t.served for t in self._table.values() if t.num_live]
            tenant.served = max(tenant.served, min(here, default=0))
        tenant.num_live += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One of its requests ended. With the last request of all the accounts are closed."""
        tenant.num_live -= 1
        if tenant.num_live == 0:
            here = [t.served for t in self._table.values() if t.num_live]
            if not here or tenant.served <= min(here) or len(self._table) > MAX_REMEMBERED:
                self._table.pop(tenant.name, None)
            if not here:
                self._table.clear()

    def served(self) -> dict[str, int]:
        """For people: what each was served, those without a name under "-"."""
        return {name or "-": t.served for name, t in self._table.items()}


@POLICIES.register("vtc")
def vtc(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """The least served tenant's best request, again and again; each one placed counts as its whole prompt for the rest of this pass."""
    queues: dict[int, list[Req]] = {}
    tenants: dict[int, Tenant] = {}
    for req in lpm(waiting, ctx):
        queues.setdefault(id(req.tenant), []).append(req)
        tenants[id(req.tenant)] = req.tenant
    heap = [(tenants[at].served, arrival_key(reqs[0]), at) for at, reqs in queues.items()]
    heapq.heapify(heap)
    for reqs in queues.values():
        reqs.reverse()
    order: list[Req] = []
    while heap:
        served, _, at = heapq.heappop(heap)
        req = queues[at].pop()
        order.append(req)
        if queues[at]:
            heapq.heappush(heap, (served + req.num_tokens, arrival_key(queues[at][-1]), at))
    return order
