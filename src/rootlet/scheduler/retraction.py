"""When pages run short while decoding: who gives way. The choice is pure; `retract_decode` applies it through the callables it is given.

Order of keeping: larger priority, most outputs, the shortest prompt, arrival (scheduler.md 2.8): the one that loses least work goes first, and the
one that is kept always gets on, so the batch cannot starve itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootlet.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class Retraction:
    """`victims` in the order in which they were retracted; `stuck` = the only one left, which does not fit alone."""

    victims: tuple[Req, ...]
    stuck: Req | None = None


def keep_order(reqs: Sequence[Req]) -> list[Req]:
    """The last one is the first victim."""
    return sorted(reqs, key=lambda r: (-r.spec.priority, -len(r.outputs), r.prompt_len, r.spec.seq, r.rid))


def forced_victim(rows: Sequence[Req]) -> Req | None:
    """For the test hook: the first victim among those that got on since their admission, so that work still ends."""
    able = [r for r in rows if len(r.outputs) > r.outputs_at_admission]
    return keep_order(able)[-1] if able else None


def retract_decode(rows: Sequence[Req], *, fits: Callable[[Sequence[Req]], bool], retract: Callable[[Req], None]) -> Retraction:
    """Retract until the next step of the survivors `fits`; never the last one."""
    keep = keep_order(rows)
    victims: list[Req] = []
    while not fits(keep):
        if len(keep) == 1:
            return Retraction(tuple(victims), stuck=keep[0])
        victim = keep.pop()
        retract(victim)
        victims.append(victim)
    return Retraction(tuple(victims))
