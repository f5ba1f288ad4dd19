"""The one table of live requests, and the containers that are views of the phase. Every move goes through `Queues.move` (I3).

GATED and WAITING are kept in arrival order (priority first), PREFILL and DECODE in the order of admission. A retracted request comes back with
its old sequence number, so it keeps its place.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from rootlet.core.types import Phase
from rootlet.scheduler.req import Req


def arrival_key(req: Req) -> tuple[int, int, str]:
    """Larger priority first, then arrival, then rid: a total order."""
    return (-req.spec.priority, req.spec.seq, req.rid)


class Queues:
    """`by_rid` holds every request that is not DONE; each sits in exactly one of the four containers."""

    def __init__(self) -> None:
        self.by_rid: dict[str, Req] = {}
        self.waiting_version = 0  # grows when somebody joins or leaves `waiting`
        self.gated: list[Req] = []
        self.waiting: list[Req] = []
        self.prefill: list[Req] = []
        self.decode: list[Req] = []
        self._containers = {Phase.GATED: self.gated, Phase.WAITING: self.waiting, Phase.PREFILL: self.prefill, Phase.DECODE: self.decode}

    def __len__(self) -> int:
        return len(self.by_rid)

    def add(self, req: Req) -> None:
        assert req.rid not in self.by_rid, f"I3 rid {req.rid} added twice"
        self.by_rid[req.rid] = req
        self._insert(req)

    def move(self, req: Req, phase: Phase) -> None:
        """Change the phase and the container with it; DONE removes the request from the table."""
        assert req.phase is not Phase.DONE, f"I3 {req.rid} is already done"
        self.container(req.phase).remove(req)
        self.waiting_version += req.phase is Phase.WAITING
        req.phase = phase
        if phase is Phase.DONE:
            del self.by_rid[req.rid]
        else:
            self._insert(req)

    def container(self, phase: Phase) -> list[Req]:
        return self._containers[phase]

    def _insert(self, req: Req) -> None:
        self.waiting_version += req.phase is Phase.WAITING
        if req.phase in (Phase.GATED, Phase.WAITING):
            insort(self.container(req.phase), req, key=arrival_key)
        else:
            self.container(req.phase).append(req)

    @property
    def num_queued(self) -> int:
        return len(self.gated) + len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.prefill) + len(self.decode)

    def holders(self) -> Iterator[Req]:
        """Requests that hold a row."""
        yield from self.prefill
        yield from self.decode

    def decodable(self) -> list[Req]:
        """Requests that may draw another token: their last one is not launched yet."""
        return [req for req in self.decode if req.left_new > 0]

    def live(self) -> list[Req]:
        """A snapshot, in arrival order."""
        return sorted(self.by_rid.values(), key=arrival_key)
