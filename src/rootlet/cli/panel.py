"""The start-up panel of `rootlet serve`: one line of progress on a terminal, plain lines elsewhere, then a banner with lines to paste."""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console

from rootlet.engine.launch_events import LaunchEvent, print_event
from rootlet.ipc.messages import LoadProgress

DRAW_EVERY_S = 0.1
ERASE = "\x1b[K"  # from the cursor to the end of the line

CURL = """  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is the largest ocean on Earth?"}}], "temperature": 0}}'"""

OPENAI = """  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  print(client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello!"}}]).choices[0].message.content)"""


class StartupPanel:
    """Receives `LaunchEvent`s; owns the line of progress until the server is ready or ends.

    The cursor waits at the beginning of that line, so that log lines of the engine's processes fall over it and never behind it.
    `key` is asked for by the server, None = open to all.
    """

    def __init__(self, *, key: str | None, host: str) -> None:
        self._console = Console()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._drawn: LoadProgress | None = None
        self._key = key
        self._host = host
        self._url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._erase()

    def on_event(self, event: LaunchEvent) -> None:
        """Draw one event. Not a terminal: one plain line an event."""
        self._url = event.url or self._url
        if self._live and event.kind == "progress" and event.progress is not None:
            self._draw(event.progress)
            return
        self._erase()
        if not self._live or event.kind != "ready":
            print_event(event)
        if event.kind == "ready":
            self._banner(event)

    def _draw(self, new: LoadProgress) -> None:
        old = self._drawn
        if old is not None and old.phase == new.phase and new.elapsed_s - old.elapsed_s < DRAW_EVERY_S:
            return
        self._drawn = new
        text = f"{100 * new.done:3.0f} %  {new.phase}  {new.detail}  {new.elapsed_s:.1f} s"
        print(f"{ERASE}{text[: self._console.width - 1]}\r", end="", flush=True)

    def _erase(self) -> None:
        if self._drawn is not None:
            self._drawn = None
            print(ERASE, end="", flush=True)

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
