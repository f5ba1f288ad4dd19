"""What a start, a run and an end look like to whoever watches the server: a terminal, a panel, a test."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from rootlet.ipc.messages import LoadProgress, SchedulerReady


@dataclass(frozen=True, slots=True)
class LaunchEvent:
    """What a terminal may want to show. `url` from "listening" on; `progress` with "progress"; `ready` with "ready"."""

    kind: Literal["listening", "progress", "ready", "draining", "failed", "stopped"]
    url: str = ""
    message: str = ""
    progress: LoadProgress | None = None
    ready: SchedulerReady | None = None
    served_names: tuple[str, ...] = ()


def print_event(event: LaunchEvent) -> None:
    """One plain line an event on stdout, in one write each (other processes log to the same place); failures on stderr."""
    text = _plain_text(event)
    if text:
        stream = sys.stderr if event.kind == "failed" else sys.stdout
        print(f"rootlet: {text}\n", end="", file=stream, flush=True)


def _plain_text(event: LaunchEvent) -> str:
    match event.kind:
        case "listening":
            return f"listening on {event.url} (model is loading)"
        case "ready":
            return f"ready on {event.url} as {', '.join(event.served_names)}"
        case "progress":
            p = event.progress
            return f"{p.phase} done ({p.elapsed_s:.1f} s)" if p is not None and p.done >= 1.0 and p.phase != "ready" else ""
        case _:
            return event.message or event.kind
