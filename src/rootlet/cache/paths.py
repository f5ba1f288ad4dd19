"""Paths of the radix tree: pure functions over nodes and their parents, for the tree and its host side. Nothing is owned here."""

from __future__ import annotations

from collections.abc import Sequence

from rootlet.cache import events
from rootlet.cache import key as keys
from rootlet.cache.actions import Announce
from rootlet.cache.components.base import TreeComponent
from rootlet.cache.events import BlockStored
from rootlet.cache.node import UnifiedTreeNode
from rootlet.core.types import Namespace


def path_from(node: UnifiedTreeNode, start: int) -> list[UnifiedTreeNode]:
    """Nodes of [start, node.end), from the shallowest down. `start` is the end of one above, or 0."""
    path = []
    while node.end > start and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def on_device(node: UnifiedTreeNode) -> UnifiedTreeNode:
    """The deepest node of the path to `node` that is on the device, or its root."""
    while node.full_pages is None and node.parent is not None:
        node = node.parent
    return node


def accepted(
    node: UnifiedTreeNode, partial: UnifiedTreeNode | None, common: int, components: Sequence[TreeComponent], *, host: bool = False
) -> tuple[UnifiedTreeNode, int, list[int]]:
    """(deepest node above, tokens) of the longest prefix on the path to `node`, and `common` tokens into `partial`, that every gate accepts:
    of what is on the device, or with `host` on any tier. Then the tokens that full attention with each component alone would accept.

    Gates remember what they saw: each is asked at each node, from the root down, whatever the others said.
    """
    path: list[tuple[UnifiedTreeNode, int]] = [] if partial is None else [(partial, common)]
    while node.parent is not None:
        path.append((node, node.end - node.start))
        node = node.parent
    gates, best, length, alone = [component.gate(host=host) for component in components], node, 0, [0] * len(components)
    for at, part in reversed(path):
        verdicts = [gate(at, part) for gate in gates]
        if host or at.full_pages is not None:
            alone = [at.start + part if verdict else known for verdict, known in zip(verdicts, alone, strict=True)]
            if all(verdicts):
                best, length = at, at.start + part
    return best, length, alone


def stored(node: UnifiedTreeNode, namespace: Namespace, *, block_bytes: int, medium: str = events.DEVICE) -> Announce:
    """`node` is on one more tier. The blocks of a new one are hashed, on from those of its parent."""
    above = node.parent.hashes if node.parent is not None else None
    parent = above[-1] if above else None
    if node.hashes is None:
        node.hashes = events.chain(parent or events.seed(namespace), node.key, block_bytes=block_bytes)
    tokens = tuple(keys.unpack(node.key).tolist())
    block_size = block_bytes // keys.UNIT_BYTES
    return Announce(BlockStored(tuple(node.hashes), parent, tokens, block_size, keys.normalise(namespace).lora_id, medium))


def count_use(node: UnifiedTreeNode, *, inserted_len: int, priority: int) -> None:
    """One more request uses the path up to `node`, of which it used [0, inserted_len) before. Priorities never rise from parent to child, so
    the first ancestor that needs neither change ends the walk."""
    at: UnifiedTreeNode | None = node
    while at is not None and at.parent is not None and (at.end > inserted_len or at.priority < priority):
        at.hits += at.end > inserted_len
        at.priority = max(at.priority, priority)
        at = at.parent


def on_one_path(node: UnifiedTreeNode, protected: UnifiedTreeNode, *, limit_len: int) -> bool:
    """`protected` is an ancestor of `node` (or `node` itself); of a key that ends above it, `node` must be the ancestor."""
    if protected.end == 0:
        return True
    low, high = (protected, node) if protected.end <= node.end else (node, protected)
    at = high
    while at.end > low.end and at.parent is not None:
        at = at.parent
    return at is low and low.end == min(protected.end, limit_len)
