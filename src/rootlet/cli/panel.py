"""The start-up panel of `rootlet serve`: phases with progress on a terminal, plain lines elsewhere, then a banner with lines to paste."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rootlet.engine.launch_events import LaunchEvent, print_event

CURL = """  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is the largest ocean on Earth?"}}], "temperature": 0}}'"""

OPENAI = """  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  print(client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello!"}}]).choices[0].message.content)"""


class StartupPanel:
    """Receives `LaunchEvent`s; owns the live display until the server is ready, or until the context ends: a hidden cursor must come back.

    `key` is asked for by the server, None = open to all.
    """

    def __init__(self, *, key: str | None, host: str) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._phases: dict[str, tuple[float, str, float]] = {}
        self._key = key
        self._host = host
        self._url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def on_event(self, event: LaunchEvent) -> None:
        """Draw one event. Not a terminal: one plain line an event."""
        self._url = event.url or self._url
        if not self._console.is_terminal:
            print_event(event)
        elif event.kind == "listening":
            self._console.print(f"[bold]rootlet[/] listening on {event.url}")
            self._live = Live(self._table(), console=self._console, refresh_per_second=8)
            self._live.start()
        elif event.kind == "progress" and event.progress is not None:
            p = event.progress
            self._phases[p.phase] = (p.done, p.detail, p.elapsed_s)
            if self._live is not None:
                self._live.update(self._table())
        else:
            self._close()
            if event.kind != "ready":
                print_event(event)
        if event.kind == "ready":
            self._banner(event)

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for phase, (done, detail, elapsed_s) in self._phases.items():
            mark = "[green]done[/]" if done >= 1.0 else f"{100 * done:3.0f} %"
            table.add_row(mark, phase, detail, f"{elapsed_s:.1f} s")
        return table

    def _banner(self, event: LaunchEvent) -> None:
        name = event.served_names[0] if event.served_names else "default"
        if event.ready is not None:
            for line in event.ready.memory_sum:
                print(f"  {line}")
            print(f"  KV pool {event.ready.num_pages * event.ready.page_size} tokens: what one request's prompt and answer can hold at most")
        print(f"model    {name}")
        print(f"API      {self._url}/v1     metrics {self._url}/metrics     state {self._url}/debug/state")
        if self._key is None and self._host not in {"127.0.0.1", "localhost", "::1"}:
            print("WARNING  no --api-key: everybody who reaches this address can use the server", file=sys.stderr)
        print(CURL.format(url=self._url, key=" -H 'Authorization: Bearer YOUR_KEY'" if self._key else ""))
        print(OPENAI.format(url=self._url, key="YOUR_KEY" if self._key else "none", name=name), flush=True)
