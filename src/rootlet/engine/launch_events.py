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
    """One plain line an event on stdout; failures on stderr."""
    match event.kind:
        case "listening":
            print(f"rootlet: listening on {event.url} (model is loading)", flush=True)
        case "ready":
            print(f"rootlet: ready on {event.url} as {', '.join(event.served_names)}", flush=True)
        case "failed":
            print(f"rootlet: {event.message}", file=sys.stderr, flush=True)
        case "progress":
            p = event.progress
            if p is not None and p.done >= 1.0:
                print(f"rootlet: {p.phase} {p.detail} ({p.elapsed_s:.1f} s)".replace("  ", " "), flush=True)
        case _:
            print(f"rootlet: {event.message or event.kind}", flush=True)
