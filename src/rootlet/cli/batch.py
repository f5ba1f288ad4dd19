"""`rootlet batch`: a file of OpenAI batch lines in, a file of batch replies out. Lines already answered are skipped, so it resumes.

Each line is {"custom_id", "method": "POST", "url": "/v1/chat/completions" | "/v1/completions", "body"}; bodies go through the very app that
serves HTTP, in this process, so a line means exactly what the same request to a server means.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import cyclopts

from rootlet.cli.flags import given, with_knobs
from rootlet.core.errors import InvalidValue

URLS = ("/v1/chat/completions", "/v1/completions")


def read_lines(source: Path) -> Iterator[dict[str, Any]]:
    """Validated batch lines. Raises `InvalidValue` naming file, line and fault before anything runs."""
    seen: set[str] = set()
    for number, text in enumerate(source.read_text().splitlines(), 1):
        if not text.strip():
            continue
        where = f"{source}:{number}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidValue("input", f"{where} is not JSON: {error}") from None
        if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str) or not isinstance(line.get("body"), dict):
            raise InvalidValue("input", f"{where} needs custom_id (text) and body (object)")
        if line.get("url") not in URLS:
            raise InvalidValue("url", f"{where}: url must be one of {', '.join(URLS)}, got {line.get('url')!r}")
        if line["custom_id"] in seen:
            raise InvalidValue("custom_id", f"{where}: custom_id {line['custom_id']!r} stands twice")
        seen.add(line["custom_id"])
        yield line


def answered(target: Path) -> set[str]:
    """Ids that an earlier run answered; a half-written last line is cut off so that it is answered again."""
    if not target.exists():
        return set()
    whole = [line for line in target.read_text().splitlines(keepends=True) if line.endswith("\n")]
    target.write_text("".join(whole))
    return {json.loads(line)["custom_id"] for line in whole}


async def _answer_all(app: Any, lines: list[dict[str, Any]], target: Path, concurrency: int) -> int:
    from rootlet.server.inprocess import post_json

    gate, failed = asyncio.Semaphore(concurrency), 0
    with target.open("a") as out:

        async def one(line: dict[str, Any]) -> None:
            nonlocal failed
            async with gate:
                status, body = await post_json(app, line["url"], {**line["body"], "stream": False})
            failed += status >= 400
            reply = {"status_code": status, "body": body}
            out.write(json.dumps({"id": f"batch_req_{line['custom_id']}", "custom_id": line["custom_id"], "response": reply, "error": None}) + "\n")
            out.flush()

        await asyncio.gather(*(one(line) for line in lines))
    return failed


@with_knobs
def batch(
    source: Annotated[Path, cyclopts.Parameter(help="file of batch lines")],
    target: Annotated[Path, cyclopts.Parameter(help="file that replies are appended to")],
    model: Annotated[str | None, cyclopts.Parameter(help="as for serve; none = the default model")] = None,
    *,
    concurrency: Annotated[int, cyclopts.Parameter(help="requests in flight")] = 64,
    **flags: Any,
) -> int:
    """Answer a file of OpenAI batch lines; exit code 1 when a line failed."""
    if not source.is_file():
        raise InvalidValue("source", f"there is no file {source}")
    done = answered(target)
    lines = [line for line in read_lines(source) if line["custom_id"] not in done]
    print(f"{len(done)} answered before, {len(lines)} to do", file=sys.stderr)
    if not lines:
        return 0
    from rootlet.engine.engine import Engine
    from rootlet.server.app import build_app

    with Engine(model, **{"log_level": "warning", "log_requests": False, **given(flags)}) as engine:
        failed = engine.run(_answer_all(build_app(engine.manager, engine.config), lines, target, concurrency))
    print(f"{len(lines) - failed} answered, {failed} failed", file=sys.stderr)
    return 1 if failed else 0
