"""Policies that ask the cache how much of a request it holds already: lpm, dfs-weight, hrrn, shortest-prefill-first.

Probing is read-only and costs a tree walk a request. Without a prefix cache lpm and dfs-weight are fcfs; the other two go on by length.
Families of requests that begin alike and are not cached yet send one member ahead (`in_batch_prefix`), except under dfs-weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rootlet.cache import key as keys
from rootlet.core.types import Namespace
from rootlet.scheduler.in_batch_prefix import InBatchPrefix
from rootlet.scheduler.policies.base import LEAVES, MATCHED_QUEUE_LIMIT, POLICIES, SCORED_LIMIT, PolicyContext, by_priority, overdue_first
from rootlet.scheduler.queue import arrival_key
from rootlet.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class Scored:
    """`follows`: an earlier one of its family should go first, in this pass. `match_len`, `uncached_len` in tokens."""

    req: Req
    follows: bool
    match_len: int

    @property
    def uncached_len(self) -> int:
        return self.req.num_tokens - self.match_len


def score(waiting: Sequence[Req], ctx: PolicyContext) -> list[Scored]:
    families = InBatchPrefix(ctx.page_size)
    scored = []
    for req in waiting:
        match_len = ctx.probe(req)
        scored.append(Scored(req, ctx.cache_enabled and families.deprioritise(req, match_len), match_len))
    return scored


@POLICIES.register("lpm")
def lpm(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Longest prefix match first (aged), families' followers last; fcfs above `MATCHED_QUEUE_LIMIT` or without a cache."""
    if len(waiting) > MATCHED_QUEUE_LIMIT or not ctx.cache_enabled:
        return list(waiting)
    scored = score(waiting, ctx)
    scored.sort(key=lambda s: (-s.req.spec.priority, s.follows, -(s.match_len + ctx.age(s.req)), arrival_key(s.req)))
    return [s.req for s in scored]


@POLICIES.register("hrrn")
def hrrn(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Highest response ratio next: tokens prefilled by all since it came, over the tokens that it needs itself. A clock of tokens, not of seconds,
    so that runs repeat. Nothing to compute = first; followers last; fcfs above `MATCHED_QUEUE_LIMIT`."""
    if len(waiting) > MATCHED_QUEUE_LIMIT:
        return list(waiting)
    now = ctx.prefilled()

    def rank(s: Scored) -> tuple[int, bool, bool, float, tuple[int, int, str]]:
        waited = now - s.req.times.prefilled_at_arrival
        return (-s.req.spec.priority, s.follows, s.uncached_len > 0, -waited / max(s.uncached_len, 1), arrival_key(s.req))

    return [s.req for s in sorted(score(waiting, ctx), key=rank)]


@POLICIES.register("shortest-prefill-first")
def shortest_prefill_first(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Fewest tokens to compute first (aged), followers last; among the first `SCORED_LIMIT`."""
    scored = score(waiting[:SCORED_LIMIT], ctx)
    scored.sort(key=lambda s: (-s.req.spec.priority, s.follows, max(s.uncached_len, 1) - ctx.age(s.req), arrival_key(s.req)))
    return [s.req for s in scored] + list(waiting[SCORED_LIMIT:])


def leave_to_shorter(req: Req, ctx: PolicyContext) -> int:
    """Tokens that waiting requests need which are shorter than what the chunked `req` has left, so that they fit into the same step."""
    left = req.fill_len - req.planned
    needs = (max(r.num_tokens - ctx.probe(r), 1) for r in ctx.queues.waiting[:SCORED_LIMIT])
    return sum(need for need in needs if need < left)


LEAVES["shortest-prefill-first"] = leave_to_shorter


@dataclass(slots=True)
class _Branch:
    """A point where cached prefixes of waiting requests part, or where one of them ends. `depth` in bytes from the root."""

    depth: int
    children: list[_Branch] = field(default_factory=list)
    reqs: list[Req] = field(default_factory=list)
    weight: int = 0


@POLICIES.register("dfs-weight")
def dfs_weight(waiting: Sequence[Req], ctx: PolicyContext) -> list[Req]:
    """Walk the cached tree depth first, the child below which most requests wait first, a node's own requests after those of its children: who
    shares most is served together, while it is cached. Among the first `SCORED_LIMIT`; fcfs without a cache.

    Only the part of the tree that the queue reaches matters, so it is rebuilt from the matched prefixes: where two of them part, the tree does.
    """
    if not ctx.cache_enabled:
        return list(waiting)
    by_namespace: dict[Namespace, list[tuple[bytes, int, Req]]] = {}
    for place, req in enumerate(waiting[:SCORED_LIMIT]):
        by_namespace.setdefault(req.spec.namespace, []).append((bytes(req.tokens[: 4 * ctx.probe(req)]), place, req))
    top = _Branch(0, children=[_branches(found, ctx.page_size) for found in by_namespace.values()])
    return overdue_first(by_priority(_emit(top)), ctx) + list(waiting[SCORED_LIMIT:])


def _branches(found: list[tuple[bytes, int, Req]], page_size: int) -> _Branch:
    """The branching points of some prefixes, as a tree: sorted prefixes, each compared with the one before."""
    root, before = _Branch(0), b""
    path = [root]
    for prefix, _, req in sorted(found, key=lambda f: f[:2]):
        shared = keys.first_diff(before, 0, prefix, 0, length=min(len(before), len(prefix)) // keys.UNIT_BYTES)
        depth = keys.floor_len(shared, page_size) * keys.UNIT_BYTES
        last = None
        while path[-1].depth > depth:
            last = path.pop()
        if path[-1].depth < depth:
            assert last is not None, "a prefix cannot part below the one before it"
            path[-1].children[-1] = parting = _Branch(depth, children=[last])
            path.append(parting)
        if len(prefix) > depth:
            path[-1].children.append(leaf := _Branch(len(prefix)))
            path.append(leaf)
        path[-1].reqs.append(req)
        before = prefix
    return root


def _emit(top: _Branch) -> list[Req]:
    """Post-order, heavier children first, earlier arrival among equals. Without recursion: prefixes may nest as deep as the queue is long."""
    preorder, stack = [], [top]
    while stack:
        node = stack.pop()
        preorder.append(node)
        stack.extend(node.children)
    first: dict[int, tuple[int, int, str]] = {}
    for node in reversed(preorder):
        node.weight = len(node.reqs) + sum(child.weight for child in node.children)
        first[id(node)] = min([arrival_key(r) for r in node.reqs] + [first[id(child)] for child in node.children], default=(0, 0, ""))
    reversed_order: list[Req] = []
    stack = [top]
    while stack:  # own requests, then children with the lightest first: the exact reverse of what is wanted
        node = stack.pop()
        reversed_order += sorted(node.reqs, key=arrival_key, reverse=True)
        stack.extend(sorted(node.children, key=lambda c: (-c.weight, first[id(c)])))
    return reversed_order[::-1]
