"""`rootlet batch`: a file of OpenAI batch lines in, a file of batch replies out. Lines already answered are skipped, so it resumes.

Each line is {"custom_id", "method": "POST", "url": "/v1/chat/completions" | "/v1/completions", "body"}; bodies go through the very app that
serves HTTP, in this process, so a line means exactly what the same request to a server means.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import reprlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import cyclopts

from rootlet.cli.flags import LOCAL, with_knobs
from rootlet.core.errors import InvalidValue

FAILED, TOO_MANY, SERVER_FAULT = 400, 429, 500
URLS = ("/v1/chat/completions", "/v1/completions")


def read_lines(source: Path) -> Iterator[dict[str, Any]]:
    """Validated batch lines, read as strictly as a server reads a body. Raises `InvalidValue` naming file, line and fault before anything runs."""
    from rootlet.server.body import parse_object

    seen: set[str] = set()
    for number, text in enumerate(_bytes_of("source", source).removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not text.strip():
            continue
        where = f"{source}:{number}"
        try:
            line = parse_object(text)
        except InvalidValue as error:
            raise InvalidValue("input", f"{where} is not JSON that a request may hold: {error.message}") from None
        if not isinstance(line.get("custom_id"), str) or not isinstance(line.get("body"), dict):
            raise InvalidValue("input", f"{where} needs custom_id (text) and body (object)")
        if line.get("url") not in URLS:
            raise InvalidValue("url", f"{where}: url must be one of {', '.join(URLS)}, got {reprlib.repr(line.get('url'))}")
        if line["custom_id"] in seen:
            raise InvalidValue("custom_id", f"{where}: custom_id {reprlib.repr(line['custom_id'])} stands twice")
        seen.add(line["custom_id"])
        yield line


def _bytes_of(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(what, f"cannot read {path}: {error.strerror}") from None


def check_target(target: Path) -> None:
    """A file that can be written, or be made, or `InvalidValue`: devices have no end that a second run could find, and nothing is answered for
    nobody."""
    if target.exists() and not target.is_file():
        raise InvalidValue("target", f"{target} is no file; replies are appended to one, and read again by the next run")
    try:
        with target.open("ab"):
            return
    except OSError as error:
        raise InvalidValue("target", f"cannot write {target}: {error.strerror}") from None


def answered(target: Path) -> set[str]:
    """Ids that an earlier run answered for good. A half-written last line and failures that may pass are cut out, so that they are answered again.

    Raises `InvalidValue` for a file that is not of our making: it is left as it is.
    """
    if not target.exists():
        return set()
    lines = [line for line in _bytes_of("target", target).splitlines(keepends=True) if line.endswith(b"\n")]
    kept = {}
    for number, line in enumerate(lines, 1):
        name, status = _id_and_status(line, f"{target}:{number}")
        if status < FAILED or not _may_pass(status):
            kept[name] = line
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_bytes(b"".join(kept.values()))
    fresh.replace(target)
    return set(kept)


def num_failed(target: Path) -> int:
    """Lines of a finished output file that hold no answer."""
    lines = _bytes_of("target", target).splitlines()
    return sum(_id_and_status(line, f"{target}:{number}")[1] >= FAILED for number, line in enumerate(lines, 1))


def _id_and_status(line: bytes, where: str) -> tuple[str, int]:
    try:
        reply = json.loads(line)
        return str(reply["custom_id"]), int(reply["response"]["status_code"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidValue(
            "target", f"{where} is not a line of a batch's output; give a file that is new, or one that `rootlet batch` began"
        ) from None


def _may_pass(status: int) -> bool:
    return status == TOO_MANY or status >= SERVER_FAULT


def show_progress(num_done: int, total: int) -> None:
    """On a terminal only; the line is written over by the next one, and by the sum at the end, which is longer."""
    if sys.stderr.isatty():
        print(f"{num_done} of {total}\r", end="", file=sys.stderr, flush=True)


async def _answer_all(app: Any, lines: list[dict[str, Any]], target: Path, concurrency: int) -> None:
    from rootlet.server.inprocess import post_json

    gate = asyncio.Semaphore(concurrency)
    num_done = 0
    with target.open("a", encoding="utf-8") as out:

        async def one(line: dict[str, Any]) -> None:
            nonlocal num_done
            async with gate:
                status, body = await post_json(app, line["url"], {**line["body"], "stream": False})
            reply = {"status_code": status, "body": body}
            out.write(json.dumps({"id": f"batch_req_{line['custom_id']}", "custom_id": line["custom_id"], "response": reply, "error": None}) + "\n")
            out.flush()
            num_done += 1
            show_progress(num_done, len(lines))

        await asyncio.gather(*(one(line) for line in lines))


@with_knobs(server=LOCAL | {"max_n", "max_logprobs"})
def batch(
    source: Annotated[Path, cyclopts.Parameter(help="file of batch lines")],
    target: Annotated[Path, cyclopts.Parameter(help="file that replies are appended to")],
    model: Annotated[str | None, cyclopts.Parameter(help="as for serve; none = the default model")] = None,
    *,
    concurrency: Annotated[int, cyclopts.Parameter(help="requests in flight")] = 64,
    **flags: Any,
) -> int:
    """Answer a file of OpenAI batch lines; exit code 1 while a line stands failed.

    A second run answers what is missing and what failed for a reason that may pass (429, 5xx); other failures stay.
    """
    if not source.is_file():
        raise InvalidValue("source", f"there is no file {source}")
    if concurrency < 1:
        raise InvalidValue("concurrency", f"--concurrency must be at least 1, got {concurrency}")
    every = list(read_lines(source))
    check_target(target)
    done = answered(target)
    lines = [line for line in every if line["custom_id"] not in done]
    print(f"{len(every) - len(lines)} answered before, {len(lines)} to do", file=sys.stderr)
    if lines:
        from rootlet.cli.local_engine import open_engine
        from rootlet.server.app import build_app

        try:
            with open_engine(model, flags) as engine:
                engine.run(_answer_all(build_app(engine.manager, engine.config), lines, target, concurrency))
        except KeyboardInterrupt:
            print(f"\nrootlet: stopped; the same command goes on with the lines that {target} lacks", file=sys.stderr)
            raise
    failed = num_failed(target) if target.exists() else 0
    print(f"{len(every) - failed} answered, {failed} failed" + (f" (see {target})" if failed else ""), file=sys.stderr)
    return 1 if failed else 0
