"""The one loop. `depth` = steps in flight: 1 is `event_loop_normal`, 2 is `event_loop_overlap` (architecture D2); 3 works as well.

    receive -> handle -> on_tick -> plan, submit (while fewer than depth are in flight) -> collect, commit

With depth 2 the plan of step k + 1 is made and launched before the tokens of step k are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rootlet.scheduler.scheduler import Scheduler

Receive = Callable[[float], list[Any]]
"""Pending messages; may block up to so many seconds when there are none (0 = never)."""


def turn(scheduler: Scheduler, messages: list[Any], depth: int) -> None:
    """One turn: take the messages, launch at most one plan, apply at most one result."""
    for msg in messages:
        scheduler.handle(msg)
    scheduler.on_tick()
    plan = None
    if scheduler.num_in_flight < depth:
        plan = scheduler.get_next_batch_to_run()
        if plan is not None:
            scheduler.executor.submit(plan)
    if scheduler.num_in_flight and (plan is None or scheduler.num_in_flight >= depth):
        scheduler.process_batch_result(scheduler.executor.collect())


def run(scheduler: Scheduler, receive: Receive, depth: int) -> None:
    """Until a ShutdownReq has drained. Raises only what the executor raises when it is lost as a whole."""
    assert depth >= 1, f"depth must be at least 1, got {depth}"
    while not scheduler.finished_shutdown:
        turn(scheduler, receive(scheduler.wait_s()), depth)


def event_loop_normal(scheduler: Scheduler, receive: Receive) -> None:
    run(scheduler, receive, 1)


def event_loop_overlap(scheduler: Scheduler, receive: Receive) -> None:
    run(scheduler, receive, 2)
