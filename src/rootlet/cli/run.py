"""`rootlet run`: one prompt, one answer, no server."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import cyclopts

from rootlet.cli.flags import LOCAL, check_temperature, given, with_knobs
from rootlet.core.errors import InvalidValue


def check_arguments(model: str | None, prompt: str | None) -> None:
    """A lone argument is the model; whoever gave the question alone is told so, before anything is loaded. Raises `InvalidValue`."""
    if prompt is not None or model in (None, "-"):
        return
    from rootlet.engine.model_source import may_be_model

    if not may_be_model(model):
        raise InvalidValue(
            "model",
            f"the first argument is the model, and {model!r} is neither a file, a folder nor a Hub id; "
            f"to ask the default model: rootlet run - {shlex.quote(model)}",
        )


def _prompt_of_stdin() -> str:
    if sys.stdin.isatty():
        print("rootlet: type the prompt, end it with Ctrl-D (or give it as the second argument)", file=sys.stderr)
    return sys.stdin.read()


@with_knobs(server=LOCAL)
def run(
    model: Annotated[str | None, cyclopts.Parameter(help="as for serve; - or nothing = the default model", allow_leading_hyphen=True)] = None,
    prompt: Annotated[str | None, cyclopts.Parameter(help="the prompt; none = standard input")] = None,
    *,
    raw: Annotated[bool, cyclopts.Parameter(help="continue the text as it stands, without the chat template", negative="")] = False,
    max_tokens: Annotated[int | None, cyclopts.Parameter(help="longest answer [default: until the model stops; 128 with --raw]")] = None,
    temperature: Annotated[
        float | None, cyclopts.Parameter(help="0 = always the likeliest token [default: what the model recommends, else 0.7 and top_p 0.9]")
    ] = None,
    seed: Annotated[int | None, cyclopts.Parameter(help="same seed, same answer")] = None,
    **flags: Any,
) -> int:
    """Answer one prompt and exit."""
    check_arguments(model, prompt)
    check_temperature(temperature)
    text = prompt if prompt is not None else _prompt_of_stdin()
    if not text.strip():
        raise InvalidValue("prompt", "the prompt is empty: give it as the second argument or on standard input")
    from rootlet.cli.local_engine import open_engine, terminal_sampling

    stated = given({"max_tokens": max_tokens, "temperature": temperature, "seed": seed})
    with open_engine(None if model == "-" else model, flags) as engine:
        sampling = terminal_sampling(engine, stated)
        chunks = engine.generate(text, sampling, stream=True) if raw else engine.chat([{"role": "user", "content": text}], sampling, stream=True)
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
            if chunk.finish is not None and chunk.finish.message:
                print(f"\nrootlet: {chunk.finish.message}", file=sys.stderr)
                return 1
    print()
    return 0
