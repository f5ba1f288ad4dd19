"""`rootlet chat`: a conversation in the terminal, with a running server (--url) or with an engine of its own."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import cyclopts

from rootlet.cli.flags import given, with_knobs
from rootlet.core.errors import Unavailable

Messages = list[dict[str, Any]]
Answer = Callable[[Messages], Iterator[str]]
HELP = "/reset forgets the conversation, /help shows this, /quit or Ctrl-D ends"


def _over_http(url: str, key: str | None, sampling: dict[str, Any]) -> Answer:
    def answer(messages: Messages) -> Iterator[str]:
        body = json.dumps({"messages": messages, "stream": True, **sampling}).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request) as reply:
                yield from _deltas(reply)
        except urllib.error.HTTPError as error:
            raise Unavailable(json.loads(error.read())["error"]["message"]) from None
        except OSError as error:
            raise Unavailable(f"no server answers at {url}: {error} (start one with `rootlet serve`)") from None

    return answer


def _deltas(lines: Any) -> Iterator[str]:
    for line in lines:
        data = line.decode().removeprefix("data:").strip()
        if data and data != "[DONE]" and not data.startswith(":"):
            event = json.loads(data)
            if "error" in event:
                raise Unavailable(event["error"]["message"])
            yield from (c["delta"].get("content") or "" for c in event["choices"])


def _in_process(engine: Any, sampling: dict[str, Any]) -> Answer:
    return lambda messages: (chunk.text for chunk in engine.chat(messages, sampling, stream=True))


def converse(answer: Answer, system: str | None, read: Callable[[], str]) -> None:
    """Read, answer, repeat, until end of input. Ctrl-C ends an answer, not the conversation."""
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while True:
        try:
            text = read().strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text in {"/quit", "/exit"}:
            return
        if text == "/reset":
            messages = list(start)
        elif text == "/help":
            print(HELP)
        elif text:
            messages.append({"role": "user", "content": text})
            parts: list[str] = []
            with contextlib.suppress(KeyboardInterrupt):
                for part in answer(messages):
                    parts.append(part)
                    print(part, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": "".join(parts)})


@with_knobs
def chat(
    model: Annotated[str | None, cyclopts.Parameter(help="as for serve; none = the default model")] = None,
    *,
    url: Annotated[str | None, cyclopts.Parameter(help="talk to this server instead of loading a model")] = None,
    system: Annotated[str | None, cyclopts.Parameter(help="system message")] = None,
    max_tokens: Annotated[int | None, cyclopts.Parameter(help="longest answer")] = None,
    temperature: Annotated[float | None, cyclopts.Parameter(help="0 = always the likeliest token")] = None,
    seed: Annotated[int | None, cyclopts.Parameter(help="same seed, same answers")] = None,
    **flags: Any,
) -> int:
    """Talk to a model in the terminal."""
    sampling = given({"max_tokens": max_tokens, "temperature": temperature, "seed": seed})
    prompt = "> " if sys.stdin.isatty() else ""
    if url is not None:
        converse(_over_http(url, flags.get("api_key"), sampling), system, lambda: input(prompt))
        return 0
    from rootlet.engine.engine import Engine

    with Engine(model, **{"log_level": "warning", "log_requests": False, **given(flags)}) as engine:
        print(HELP)
        converse(_in_process(engine, sampling), system, lambda: input(prompt))
    return 0
