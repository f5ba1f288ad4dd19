"""Pausing: no step is launched until the scheduler is told to continue. What is in flight is always collected.

    in_place   running requests keep rows and KV and go on where they stopped
    retract    they give both back and wait again with their outputs kept, so the whole pool is free or evictable meanwhile
    abort      every request, waiting ones too, ends as aborted

Requests that arrive while paused wait; time limits go on. Source: scheduler.md 2.11.
"""

from __future__ import annotations

from rootlet.core.types import Finish, FinishKind
from rootlet.ipc.messages import PauseReq
from rootlet.scheduler.state import SchedulerState, end_req, retract_req


def pause(state: SchedulerState, msg: PauseReq) -> None:
    state.paused = msg.paused
    if not msg.paused:
        return
    if msg.mode == "retract":
        for req in list(state.queues.holders()):
            if not req.ends_in_flight:
                retract_req(state, req, "paused")
    elif msg.mode == "abort":
        for req in state.queues.live():
            end_req(state, req, Finish(FinishKind.ABORT, status=499, code="aborted", message="aborted by a pause of the server"))
