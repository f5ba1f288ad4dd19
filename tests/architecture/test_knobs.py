"""No knob does nothing: each is read somewhere outside the rooms that only carry it (config, cli)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rootlet.config.load import Knob, knobs

SRC = Path(__file__).resolve().parents[2] / "src" / "rootlet"
CARRIERS = ("config/", "cli/", "bench/")
# Settled where configurations are resolved: one device is served, any other is refused.
SETTLED = {"device"}


def _owner(node: ast.Attribute) -> str:
    """The last word before the attribute: `self._config.cache.evict` -> "cache"."""
    value = node.value
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""


def _reads() -> set[tuple[str, str]]:
    """(last word of the owner, attribute), without leading underscores."""
    paths = (p for p in SRC.rglob("*.py") if not str(p.relative_to(SRC)).startswith(CARRIERS))
    nodes = (n for path in paths for n in ast.walk(ast.parse(path.read_text())))
    return {(_owner(n).lstrip("_"), n.attr) for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


READS = _reads()


@pytest.mark.parametrize("knob", knobs().values(), ids=lambda k: k.name)
def test_a_knob_is_read(knob: Knob) -> None:
    owners = {knob.section, "args", "config", f"{knob.section}_args"}
    assert knob.name in SETTLED or READS & {(owner, knob.name) for owner in owners}
