"""`rootlet trace` and `rootlet cache`: look into a running server, and keep prefixes in its cache. Plain HTTP; nothing is loaded here."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import cyclopts

from rootlet.cli.chat_http import base_of
from rootlet.core.errors import InvalidValue, Unavailable

URL = "http://127.0.0.1:30000"
TIMEOUT_S = 30.0

Url = Annotated[str, cyclopts.Parameter(help="the server to ask")]
Rid = Annotated[str, cyclopts.Parameter(help="the id of its reply; the log has it too, as rid")]
Key = Annotated[str | None, cyclopts.Parameter(help="its API key", env_var="ROOTLET_API_KEY")]


def call(url: str, key: str | None, path: str, body: dict[str, Any] | None = None) -> str:
    """GET, or POST with a body. Returns the reply's text. Raises `InvalidValue` for a bad `url`, `Unavailable` with the server's own words."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{base_of(url)}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        raise Unavailable(_words_of(error.read(), error.code)) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"no server answers at {url}: {error} (start one with `rootlet serve`)") from None


def _words_of(reply: bytes, status: int) -> str:
    try:
        return str(json.loads(reply)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {status}"


def trace(rid: Rid, *, url: Url = URL, api_key: Key = None) -> int:
    """Explain one live or recently finished request: what happened when, and why it waited in each tick. RID = the id of the reply."""
    for line in explain(json.loads(call(url, api_key, f"/debug/requests/{urllib.parse.quote(rid, safe='')}"))):
        print(line)
    return 0


def explain(found: dict[str, Any]) -> Iterator[str]:
    """Lines for people, of what `/debug/requests/{rid}` gives."""
    user = f", user {found['user']}" if found.get("user") else ""
    size = f"prompt {found.get('prompt_len')} tokens, at most {found.get('max_new')} new"
    yield f"{found.get('rid')}: {found.get('phase')}; {size}, priority {found.get('priority', 0)}{user}"
    yield f"{'seconds':>10} {'tick':>7}  what"
    for event in found.get("events", []):
        yield from (_wait(wait) for wait in event.get("waited", []))
        yield f"{event['time_s']:>10.4f} {event['tick']:>7}  {_event(event)}"
    if found.get("dropped_events"):
        yield f"({found['dropped_events']} events in the middle were not kept)"
    yield from (_wait(wait) for wait in found.get("waiting_for", []))


def _wait(wait: dict[str, Any]) -> str:
    ticks = f"{wait['first_tick']}..{wait['last_tick']}" if wait["ticks"] > 1 else str(wait["first_tick"])
    return f"{'':>10} {ticks:>7}  waited {wait['ticks']} tick{'s' if wait['ticks'] > 1 else ''}: {wait['why']}"


def _event(event: dict[str, Any]) -> str:
    match event["what"]:
        case "admitted":
            cut = f"; a chunk ends at {event['branch_at']}, where others part, for the next one to hit" if event.get("branch_at") else ""
            return f"admitted: {event['matched']} of {event['of']} tokens were in the cache{cut}{'; shares nothing' if event.get('cold') else ''}"
        case "chunk":
            return f"chunk {event['number']}: tokens {event['start']}..{event['stop'] - 1} of {event['of']}, in step {event['step']}"
        case "finished":
            return f"finished: {event['why']} after {event['outputs']} tokens{' (' + event['code'] + ')' if event.get('code') else ''}"
        case "queued":
            return "queued, at a gate before the queue" if event.get("gated") else "queued"
        case "retracted" | "preempted" | "paused":
            why = f" ({event['why']})" if event.get("why") else ""
            return f"{event['what']}: gave its KV back with {event['outputs']} tokens drawn, waits again{why}"
        case what:
            return str(what)


def cache(
    action: Literal["tree", "stats", "pin", "unpin", "flush"],
    prefix: Annotated[str | None, cyclopts.Parameter(help="pin: the text of the prefix; unpin: the id of a pin, none = all")] = None,
    *,
    ids: Annotated[str | None, cyclopts.Parameter(help="pin: token ids instead of text, comma separated")] = None,
    ttl: Annotated[float, cyclopts.Parameter(help="pin: seconds to keep it")] = 300.0,
    wait: Annotated[float, cyclopts.Parameter(help="flush: seconds to wait until the server is idle")] = 0.0,
    url: Url = URL,
    api_key: Key = None,
) -> int:
    """Show the prefix cache of a running server, keep a prefix in it for a while, or empty it."""
    if action == "tree":
        print(call(url, api_key, "/cache/tree"), end="")
    elif action == "flush":
        print(call(url, api_key, f"/flush_cache?timeout={wait:g}", {}), end="")
    elif action == "stats":
        print(json.dumps(json.loads(call(url, api_key, "/cache/stats")), indent=2))
    elif action == "pin":
        print(call(url, api_key, "/cache/pin", {**_prefix(prefix, ids), "ttl_s": ttl}))
    else:
        print(call(url, api_key, "/cache/unpin", {"pin_id": prefix} if prefix else {"all": True}))
    return 0


def _prefix(text: str | None, ids: str | None) -> dict[str, Any]:
    if (text is None) == (ids is None):
        raise InvalidValue("prefix", "give the prefix to pin as a text, or as --ids 1,2,3")
    if ids is None:
        return {"text": text}
    try:
        return {"input_ids": [int(part) for part in ids.split(",")]}
    except ValueError:
        raise InvalidValue("ids", f"--ids must be integers, comma separated, got {ids!r}") from None
