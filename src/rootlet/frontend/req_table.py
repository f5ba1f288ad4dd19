"""The table of requests inside the engine, and the names they go by. Owned by `TokenizerManager`.

A rid names one request at a time, and a choice of n > 1 has a rid of its own (`rid-1`, `rid-2`...). The id of a batch names all of its requests, and
nobody else while one of them is open. Ids match exactly, never by prefix.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from rootlet.core.clock import Clock
from rootlet.core.errors import InvalidValue, QueueFull
from rootlet.core.ids import IdSource
from rootlet.core.types import Finish
from rootlet.frontend.req_state import ChoiceState, ReqState
from rootlet.frontend.types import GenerateReq

_REMEMBERED_STOPS = 4096
_MAX_RETRY_S = 60.0


class ReqTable:
    def __init__(self, clock: Clock, ids: IdSource) -> None:
        self._clock = clock
        self._ids = ids
        self._states: dict[str, ReqState] = {}
        self._routes: dict[str, tuple[ReqState, ChoiceState]] = {}
        self._batches: dict[str, dict[str, ReqState]] = {}
        self._stopped: OrderedDict[str, None] = OrderedDict()
        self._finish_times: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, req: GenerateReq, max_open: int) -> ReqState:
        """Make the state of a new request; its rid, seed and choices are settled here. Raises `QueueFull`, `InvalidValue` (rid in use)."""
        if len(self._routes) + req.sampling.n > max_open:
            raise QueueFull(
                f"the queue is full: {len(self._routes)} requests are running or waiting, at most {max_open} may (--max-running, --max-queue)",
                retry_after_s=self.retry_after_s(),
            )
        rid = req.rid or self._ids.rid()
        names = [rid, *(f"{rid}-{k}" for k in range(1, req.sampling.n))]
        for name in names:
            if name in self._states or name in self._batches or self._wire_rid(name) in self._routes:
                raise InvalidValue("rid", f"rid {name!r} is in use by a request that has not ended")
        if req.batch_rid is not None and req.batch_rid in self._states:
            raise InvalidValue("rid", f"rid {req.batch_rid!r} is in use by a request that has not ended")
        seed = req.sampling.seed if req.sampling.seed is not None else self._ids.seed()
        now_s = self._clock.now()
        state = ReqState(rid, tuple(ChoiceState(k, self._wire_rid(name), seed, arrived_s=now_s) for k, name in enumerate(names)), req.batch_rid)
        self._states[rid] = state
        if req.batch_rid is not None:
            self._batches.setdefault(req.batch_rid, {})[rid] = state
        for choice in state.choices:
            self._routes[choice.wire_rid] = (state, choice)
        return state

    def _wire_rid(self, name: str) -> str:
        # The scheduler may still be winding down a request that a stop string ended here; its late messages must not meet a namesake.
        while name in self._stopped:
            name += "~"
        return name

    def named(self, rid: str) -> list[ReqState]:
        """The request of this very id, or all that are open of the batch of this id."""
        one = self._states.get(rid)
        return list(self._batches.get(rid, {}).values()) if one is None else [one]

    def all(self) -> list[ReqState]:
        return list(self._states.values())

    def route(self, wire_rid: str) -> tuple[ReqState, ChoiceState] | None:
        """Where an output goes; None for a choice that has ended or is not known."""
        route = self._routes.get(wire_rid)
        return route if route is not None and route[1].finish is None else None

    def finished(self, choice: ChoiceState) -> None:
        """Take note of a choice that the engine ended: its pace, and a name that is not free yet."""
        self._finish_times.append(self._clock.now())
        if choice.finish is not None and isinstance(choice.finish.matched, str):
            self._stopped[choice.wire_rid] = None
            if len(self._stopped) > _REMEMBERED_STOPS:
                self._stopped.popitem(last=False)

    def forget(self, state: ReqState) -> None:
        if self._states.pop(state.rid, None) is not None:
            for choice in state.choices:
                self._routes.pop(choice.wire_rid, None)
            if state.batch_rid is not None:
                batch = self._batches[state.batch_rid]
                del batch[state.rid]
                if not batch:
                    del self._batches[state.batch_rid]

    def end_all(self, finish: Finish) -> None:
        """Every open choice of every request ends with `finish`; states that nobody reads any more are forgotten."""
        for state in self.all():
            state.end_all(finish)
            if state.detached:
                self.forget(state)

    def retry_after_s(self) -> float:
        """Seconds until a place is likely free, from the pace of the last finishes; at least 1."""
        times = self._finish_times
        if len(times) < 2 or times[-1] <= times[0]:
            return 1.0
        return min(_MAX_RETRY_S, max(1.0, (times[-1] - times[0]) / (len(times) - 1)))
