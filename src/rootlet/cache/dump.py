"""The radix tree as ASCII, for `/debug/state` and failed assertions. Reads the tree, changes nothing."""

from __future__ import annotations

from rootlet.cache import key as keys
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.tree_core import UnifiedTreeCore
from rootlet.core.types import Namespace

_SHOWN = 4


def pretty(core: UnifiedTreeCore, *, max_nodes: int) -> str:
    """One line a node: span, first and last tokens of the edge, pages, locks (pins; `*` = on a locked path), hits, and
    units of the other components (0 = tombstone), then those on the host. A child is indented."""
    lines = [f"radix tree: {core.num_nodes} nodes, {len(core.roots)} namespaces, {core.num_locks} locks, page {core.page_size}, epoch {core.epoch}"]
    shown = 0
    for namespace, root in core.roots.items():
        lines.append(_title(namespace))
        stack = [(child, 1) for child in reversed(root.children.values())]
        while stack and shown < max_nodes:
            node, depth = stack.pop()
            others = "".join(f" {component.name} {component.num_pages(node)}" for component in core.others)
            others += "".join(f" host {name} {len(units)}" for name, units in (node.host or {}).items())
            lines.append(_line(node, depth) + others)
            shown += 1
            stack.extend((child, depth + 1) for child in reversed(node.children.values()))
    if shown < core.num_nodes:
        lines.append(f"... {core.num_nodes - shown} more nodes")
    return "\n".join(lines)


def _title(namespace: Namespace) -> str:
    named = [f"{field}={value!r}" for field, value in zip(Namespace._fields, namespace, strict=True) if value is not None]
    return ", ".join(named) or "(no namespace)"


def _line(node: UnifiedTreeNode, depth: int) -> str:
    pages = "none" if node.full_pages is None else _brief(node.full_pages.tolist())
    star = "*" if node.active else ""
    return (
        f"{'|  ' * (depth - 1)}+- [{node.start}, {node.end}) tokens {_brief(keys.unpack(node.key).tolist())}"
        f" pages {pages} locks {node.pins}{star} hits {node.hits}"
    )


def _brief(items: list[int]) -> str:
    if len(items) <= 2 * _SHOWN:
        return " ".join(map(str, items))
    return f"{' '.join(map(str, items[:_SHOWN]))} .. {' '.join(map(str, items[-_SHOWN:]))} ({len(items)})"
