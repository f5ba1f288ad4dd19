"""`rootlet chat`: a conversation in the terminal, with a running server (--url) or with an engine of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Annotated, Any

import cyclopts

from rootlet.cli.chat_http import Messages, answers_of
from rootlet.cli.flags import LOCAL, check_temperature, given, with_knobs
from rootlet.core.env import environment

Answer = Callable[[Messages], Generator[str, None, None]]
HELP = "/reset forgets the conversation, /help shows this, /quit or Ctrl-D ends"


def _in_process(engine: Any, sampling: dict[str, Any]) -> Answer:
    def answer(messages: Messages) -> Generator[str, None, None]:
        with contextlib.closing(engine.chat(messages, sampling, stream=True)) as chunks:  # an answer that is left is aborted now
            for chunk in chunks:
                yield chunk.text

    return answer


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
            # A byte that is no text comes as half a surrogate pair, which would end the conversation.
            messages.append({"role": "user", "content": text.encode("utf-8", "replace").decode()})
            parts: list[str] = []
            with contextlib.suppress(KeyboardInterrupt), contextlib.closing(answer(messages)) as stream:
                for part in stream:
                    parts.append(part)
                    print(part, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": "".join(parts)})


@with_knobs(server=LOCAL | {"api_key"})
def chat(
    model: Annotated[str | None, cyclopts.Parameter(help="as for serve; none = the default model")] = None,
    *,
    url: Annotated[str | None, cyclopts.Parameter(help="talk to this server instead of loading a model; host:port is enough")] = None,
    system: Annotated[str | None, cyclopts.Parameter(help="system message")] = None,
    max_tokens: Annotated[int | None, cyclopts.Parameter(help="longest answer")] = None,
    temperature: Annotated[
        float | None,
        cyclopts.Parameter(
            help="0 = always the likeliest token [default: what the model recommends, else 0.7 and top_p 0.9; with --url the server's]"
        ),
    ] = None,
    seed: Annotated[int | None, cyclopts.Parameter(help="same seed, same answers")] = None,
    **flags: Any,
) -> int:
    """Talk to a model in the terminal."""
    sampling = given({"max_tokens": max_tokens, "temperature": temperature, "seed": seed})
    prompt = "> " if sys.stdin.isatty() else ""
    if url is not None:
        request = sampling | given({"model": model})
        key = flags.get("api_key") or environment().get("ROOTLET_API_KEY")
        converse(answers_of(url, key, request), system, lambda: input(prompt))
        return 0
    check_temperature(temperature)
    from rootlet.cli.local_engine import open_engine, terminal_sampling

    with open_engine(model, flags) as engine:
        print(HELP)
        converse(_in_process(engine, terminal_sampling(engine, sampling)), system, lambda: input(prompt))
    return 0
