"""`rootlet run`: one prompt, one answer, no server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import cyclopts

from rootlet.cli.flags import given, with_knobs
from rootlet.core.errors import InvalidValue


@with_knobs
def run(
    model: Annotated[str | None, cyclopts.Parameter(help="as for serve; - or nothing = the default model", allow_leading_hyphen=True)] = None,
    prompt: Annotated[str | None, cyclopts.Parameter(help="the prompt; none = standard input")] = None,
    *,
    raw: Annotated[bool, cyclopts.Parameter(help="continue the text as it stands, without the chat template", negative="")] = False,
    max_tokens: Annotated[int | None, cyclopts.Parameter(help="longest answer [default: until the model stops]")] = None,
    temperature: Annotated[float | None, cyclopts.Parameter(help="0 = always the likeliest token")] = None,
    seed: Annotated[int | None, cyclopts.Parameter(help="same seed, same answer")] = None,
    **flags: Any,
) -> int:
    """Answer one prompt and exit."""
    from rootlet.engine.engine import Engine

    text = prompt if prompt is not None else sys.stdin.read()
    if not text.strip():
        raise InvalidValue("prompt", "the prompt is empty: give it as the second argument or on standard input")
    sampling = given({"max_tokens": max_tokens, "temperature": temperature, "seed": seed})
    with Engine(None if model == "-" else model, **{"log_level": "warning", "log_requests": False, **given(flags)}) as engine:
        chunks = engine.generate(text, sampling, stream=True) if raw else engine.chat([{"role": "user", "content": text}], sampling, stream=True)
        for chunk in chunks:
            print(chunk.text, end="", flush=True)
            if chunk.finish is not None and chunk.finish.message:
                print(f"\nrootlet: {chunk.finish.message}", file=sys.stderr)
                return 1
    print()
    return 0
