"""Prints docs/a-request.md: one chat request to the default model, followed through every room, with the ids, lengths and pages it really had.

    python -m rootlet.bench.trace_doc > docs/a-request.md

Fixed prompts, greedy, one thread, a clock that stands still: the same document on every run, which a test compares with the committed one.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from rootlet.bench.traced_run import CHAT, Record, Step, TracedRuntime
from rootlet.config.schema import CacheArgs, ComputeArgs, ModelArgs, RuntimeConfig, SchedulerArgs, ServerArgs
from rootlet.engine.model_side import load_executor, load_front
from rootlet.engine.model_source import resolve_model
from rootlet.ipc.messages import StopReq, TokenizedGenerateReqInput
from rootlet.scheduler.control import plan_line

SYSTEM = (
    "You are a patient teacher of geography. Answer each question of the class with one short sentence, and never with more than one. "
    "If you do not know the answer, then say so, in as few words as you can."
)
EARLIER = "What is the capital of Japan?"
QUESTION = (
    "I have looked for it for an hour on the old map that hangs in our kitchen, between the rivers, the mountains and the sea, and could not "
    "find it. What is the capital of France?"
)
PAGE_SIZE, CHUNK_LEN, POOL_LEN = 16, 32, 1024


def _body(rid: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"rid": rid, "messages": messages, "temperature": 0, "seed": 7, "max_tokens": 16, "stop": ["."], "return_token_ids": True}


def _config(kernels: str) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelArgs(),
        cache=CacheArgs(page_size=PAGE_SIZE, max_total_tokens=POOL_LEN),
        scheduler=SchedulerArgs(chunked_prefill=CHUNK_LEN, max_running=4, depth="1"),
        compute=ComputeArgs(kernels=kernels),
        server=ServerArgs(log_requests=False, detokenizer="inline"),
    )


def make_document(model: Path, *, kernels: str = "auto") -> str:
    """The whole document. `model` = file of the default model. Loads it and runs two requests: a second or two."""
    config = _config(kernels)
    front = load_front(config, model)
    runtime = TracedRuntime(config, load_executor(config, model), front)
    try:
        runtime.chat(_body("earlier", EARLIER))
        record = runtime.chat(_body("traced", QUESTION))
        return "\n".join(_lines(record, runtime, front.tokenizer))
    finally:
        runtime.close()


def _lines(record: Record, runtime: TracedRuntime, tokenizer: Any) -> Iterator[str]:
    message = record.sent[0]
    assert isinstance(message, TokenizedGenerateReqInput), "the first message is the request"
    ids = np.frombuffer(message.input_ids, dtype="<i4").tolist()
    yield from _opening(record)
    yield from _prompt(ids, tokenizer)
    yield from _wire(message)
    yield from _intake(record, len(ids))
    yield from _steps(record, tokenizer)
    yield from _replies(record, tokenizer)
    yield from _closing(record, runtime)


def _code(text: str, language: str = "") -> Iterator[str]:
    yield from (f"```{language}", *text.splitlines(), "```", "")


def _paragraph(text: str) -> Iterator[str]:
    yield from (*textwrap.wrap(" ".join(text.split()), 140, break_long_words=False, break_on_hyphens=False), "")


def _opening(record: Record) -> Iterator[str]:
    yield from (
        "# One request, followed",
        "",
        "Made by `python -m rootlet.bench.trace_doc` from a request that was really answered; do not edit it by hand (a test compares).",
        f"Default model, page {PAGE_SIZE} tokens, chunks of {CHUNK_LEN} tokens, a KV pool of {POOL_LEN} tokens, depth 1 (one step in flight).",
        "[architecture.md](architecture.md) has the map; words are in [glossary.md](glossary.md).",
        "",
        f'A moment earlier another request asked "{EARLIER}" under the same system message. It is answered and gone; what it computed is still',
        "here. This is the radix tree, and who owns the pages:",
        "",
    )
    yield from _code(f"{record.tree}\n{_ledger(record.ledger)}")
    yield from ("## 1. HTTP: `server/openai/chat.py`", "", f"`POST {CHAT}` with this body:", "")
    yield from _code(orjson.dumps(_body("traced", QUESTION), option=orjson.OPT_INDENT_2).decode(), "json")
    yield from (
        "`parse_chat` checks every field and makes one `GenerateReq`; `render` runs the model's chat template over `messages`. From here on no room",
        "knows which dialect the request came in.",
        "",
    )


def _prompt(ids: list[int], tokenizer: Any) -> Iterator[str]:
    yield from ("## 2. Text to tokens: `frontend/tokenizer_manager.py`", "")
    yield from _paragraph(f"""`TokenizerManager.generate` tokenizes the rendered prompt: {len(ids)} ids, here one page ({PAGE_SIZE} tokens) a row,
        with the text they spell.""")
    yield from ("| positions | ids | text |", "|---|---|---|")
    for start in range(0, len(ids), PAGE_SIZE):
        part = ids[start : start + PAGE_SIZE]
        text = tokenizer.decode(part, skip_special_tokens=False)
        yield f"| {start}..{start + len(part) - 1} | {' '.join(map(str, part))} | {_quoted(text)} |"
    yield ""


def _wire(message: TokenizedGenerateReqInput) -> Iterator[str]:
    shown = msgspec.to_builtins(message)
    shown["input_ids"] = f"<{len(message.input_ids)} bytes, 4 an id>"
    shown["sampling"] = _given(message.sampling)
    shown["detok"] = _given(message.detok)
    shown = {key: value for key, value in shown.items() if value not in (None, False)}
    size = len(msgspec.msgpack.encode(message))
    yield from (
        "## 3. Front to scheduler: `ipc/messages.py`",
        "",
        f"One message, {size} bytes of msgpack. Fields that have their default are left out here:",
        "",
    )
    yield from _code(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode(), "json")


def _intake(record: Record, prompt_len: int) -> Iterator[str]:
    first = record.steps[0]
    prefix_len = int(first.plan.prefix_lens[0])
    cached, own = first.pages[: prefix_len // PAGE_SIZE], first.pages[prefix_len // PAGE_SIZE :]
    yield from ("## 4. Into the queue, out of the queue: `scheduler/intake.py`, `scheduler/prefill_adder.py`", "")
    yield from _paragraph(f"""`make_req` checks the lengths once more and clamps `max_new`; the request waits. In the same turn
        `PrefillAdder.add_one_req` asks the tree for the longest cached prefix of the {prompt_len} tokens: **{prefix_len}** tokens, whole pages
        only. It locks that path, takes a row of the page table and pages for the rest of the prompt: row {first.before["row"]}, pages
        {_brace(cached)} borrowed from the tree, {_brace(own)} its own.""")


def _steps(record: Record, tokenizer: Any) -> Iterator[str]:
    yield from ("## 5. The steps: `scheduler/batch.py`, `runner/model_runner.py`, `scheduler/commit.py`", "")
    yield from _paragraph("""`ScheduleBatch.freeze` makes a `StepPlan`; `ModelRunner.run` embeds its tokens, runs the layers (each writes K and V to
        the plan's slots, then attends over the row's pages), and draws; `commit` applies the result. A plan in one line, as `/debug/state` shows
        it: step, mode, `rid.epoch@row[from,to)`, `s` where a token is drawn, and the slots that K and V go to; slot = page * page size +
        offset.""")
    yield from _code("\n".join(_short(plan_line(step.plan)) for step in record.steps))
    yield from (
        "| step | computes | draws | then `protected <= committed <= allocated` | the row's pages |",
        "|---|---|---|---|---|",
    )
    for step in record.steps:
        yield _step_row(step, tokenizer)
    yield ""
    yield from _paragraph("""`protected` grows when a chunk is done: `cache_unfinished_req` gives the whole pages of it to the tree, under the
        request's lock, so a third request could use them already. `allocated` covers the whole prompt from admission on; later a page is taken
        when a token crosses a page's edge.""")


def _step_row(step: Step, tokenizer: Any) -> str:
    start, stop = int(step.plan.prefix_lens[0]), int(step.plan.seq_lens[0])
    tokens = step.result.rows[0].tokens
    drawn = ", ".join(f"{token} {_quoted(tokenizer.decode([token], skip_special_tokens=False))}" for token in tokens) or "nothing (middle chunk)"
    after = step.after
    lens = f"{after['protected']} <= {after['committed']} <= {after['allocated']}" if after else "gone"
    return f"| {step.plan.step} | [{start}, {stop}) | {drawn} | {lens} | {_brace(step.pages)} |"


def _replies(record: Record, tokenizer: Any) -> Iterator[str]:
    tokens = [token for batch in record.outputs for out in batch.outputs for token in out.token_ids]
    stops = [message for message in record.sent if isinstance(message, StopReq)]
    yield from ("## 6. Tokens to text: `scheduler/output.py`, `frontend/detokenizer_manager.py`", "")
    yield from _paragraph(f"""The scheduler sent {len(record.outputs)} `BatchTokenIDOutput` messages with the tokens {_brace(tokens)}. The
        detokenizer turns each token into bytes, the bytes into characters, and the characters go through the stop matcher.""")
    for stop in stops:
        yield from _paragraph(f"""It found the stop string `{stop.matched}`: the client's answer ends before it, at once, and the scheduler hears of
            it by `StopReq(rid={stop.rid!r}, keep_len={stop.keep_len}, matched={stop.matched!r})`. Nothing past the first {stop.keep_len} tokens
            enters the tree. The scheduler's own last message for this request is dropped: the client has had its end already.""")
    shown = {key: value for key, value in record.reply.items() if key not in {"created", "system_fingerprint", "prompt_token_ids"}}
    yield from ("The reply (without `created`, `system_fingerprint` and the prompt's ids):", "")
    yield from _code(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode(), "json")


def _closing(record: Record, runtime: TracedRuntime) -> Iterator[str]:
    yield from (
        "## 7. What stays: `cache/unified_radix_cache.py`",
        "",
        "`cache_finished_req` published whole pages, freed the request's other pages, and gave back lock and row. The tree now, and the pages:",
        "",
    )
    yield from _code(f"{runtime.tree()}\n{_ledger(runtime.ledger())}")
    yield from _paragraph("""Nobody runs, so every page is free or evictable (I10 in [invariants.md](invariants.md)). Where the two prompts part, an
        edge was split; what they share is held once.""")


def _ledger(pages: dict[str, int]) -> str:
    return "pages: " + ", ".join(f"{owner} {count}" for owner, count in pages.items())


def _given(value: msgspec.Struct) -> dict[str, Any]:
    """Fields that differ from their default."""
    defaults = msgspec.to_builtins(type(value)())
    return {key: field for key, field in msgspec.to_builtins(value).items() if field != defaults[key]}


def _short(line: str) -> str:
    """A plan's line with a long run of slots cut in the middle."""
    head, _, slots = line.partition(" -> ")
    items = slots.strip("[]").split(", ")
    return f"{head} -> [{', '.join(items if len(items) <= 6 else [*items[:3], '...', *items[-2:]])}]"


def _brace(items: list[int]) -> str:
    return " ".join(map(str, items)) or "none"


def _quoted(text: str) -> str:
    return f"`{text!r}`".replace("|", "\\|")


def main() -> None:
    """Write the document to stdout."""
    sys.stdout.write(make_document(resolve_model(None)))


if __name__ == "__main__":
    main()
