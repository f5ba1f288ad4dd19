"""Named choices list the near ones; a clock of tests moves only forwards and only when told to."""

from __future__ import annotations

import pytest

from rootlet.core.clock import VirtualClock
from rootlet.core.errors import BadConfig
from rootlet.core.registry import Registry


def test_an_unknown_name_is_answered_with_the_near_and_the_known() -> None:
    registry: Registry[int] = Registry("eviction policy")
    registry.register("lru")(1)
    registry.register("priority")(2)
    assert (registry.get("lru"), registry.names(), list(registry), "lfu" in registry) == (1, ["lru", "priority"], ["lru", "priority"], False)
    with pytest.raises(BadConfig, match=r"^unknown eviction policy 'priorty'; did you mean 'priority'\? \(known: lru, priority\)$"):
        registry.get("priorty")
    with pytest.raises(BadConfig, match=r"^unknown eviction policy 'zzz' \(known"):
        registry.get("zzz")


def test_a_name_belongs_to_one() -> None:
    registry: Registry[int] = Registry("x")
    registry.register("a")(1)
    with pytest.raises(AssertionError, match="registered twice"):
        registry.register("a")(2)


def test_virtual_time_is_told() -> None:
    clock = VirtualClock(5.0)
    clock.advance(2.5)
    assert (clock.now(), clock.now()) == (7.5, 7.5)
    with pytest.raises(AssertionError):
        clock.advance(-0.1)
