"""A reason to wait before the queue: grammar compilation, adapters, prefetch, a parent's prefill. A new reason is a new file beside this one.

A gate never blocks and never raises: it answers open, not yet, or the error that ends the request. Several gates of one request must all be open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rootlet.core.types import Finish
from rootlet.scheduler.req import Req


class Gate(Protocol):
    """`name` goes into the wait reasons of a request as gate:name."""

    @property
    def name(self) -> str: ...

    def begin(self, req: Req) -> bool:
        """Start whatever must be waited for; False = this request does not concern the gate (poll is then never called)."""
        ...

    def poll(self, req: Req) -> bool | Finish:
        """True = open, False = not yet, Finish = it failed and the request ends with this."""
        ...

    def cancel(self, req: Req) -> None:
        """The request ended while waiting; forget it. Also called when it never began."""
        ...


class GateKeeper:
    """The gates of one scheduler and who still waits at which."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = tuple(gates)
        self._closed: dict[str, list[Gate]] = {}

    def begin(self, req: Req) -> bool:
        """Start all gates; True when at least one is closed for `req`."""
        waits_at = [gate for gate in self._gates if gate.begin(req)]
        if waits_at:
            self._closed[req.rid] = waits_at
        return bool(waits_at)

    def poll(self, req: Req) -> bool | Finish:
        """True = all open. Notes the first closed one as the reason to wait."""
        closed: list[Gate] = []
        for gate in self._closed.get(req.rid, ()):
            verdict = gate.poll(req)
            if isinstance(verdict, Finish):
                return verdict
            if not verdict:
                closed.append(gate)
        if not closed:
            self._closed.pop(req.rid, None)
            return True
        self._closed[req.rid] = closed
        req.times.waited_for(f"gate:{closed[0].name}")
        return False

    def cancel(self, req: Req) -> None:
        for gate in self._closed.pop(req.rid, ()):
            gate.cancel(req)
