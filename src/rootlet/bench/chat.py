"""MT-bench: two-turn chats at 16 concurrent over HTTP with the official openai client, prefix cache on and off, against a trie oracle.

The oracle is independent of the server's tree: a plain dictionary of token pages, filled with prompt + output of each reply in the order in
which replies ended at the client. For every second turn it predicts `cached_tokens`; the run fails when one differs. `make bench-chat`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rootlet.bench.server_process import running_server


@dataclass(slots=True)
class Reply:
    turn: int
    prompt_len: int
    output_len: int
    cached_len: int
    predicted_len: int
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class TrieOracle:
    """Which whole pages of a token sequence were seen before. `pages[prefix of k pages]` as nested dictionaries."""

    page_size: int
    root: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def _pages(self, ids: list[int]) -> list[tuple[int, ...]]:
        p = self.page_size
        return [tuple(ids[i : i + p]) for i in range(0, len(ids) - len(ids) % p, p)]

    def insert(self, ids: list[int]) -> None:
        node = self.root
        for page in self._pages(ids):
            node = node.setdefault(page, {})

    def predict(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that are cached: the last one is always computed, so only len - 1 of them can match."""
        node, matched = self.root, 0
        for page in self._pages(prompt[:-1]):
            if page not in node:
                break
            node, matched = node[page], matched + self.page_size
        return matched


async def _tokenize(client: Any, messages: list[dict[str, str]]) -> list[int]:
    body = {"messages": messages, "add_generation_prompt": True}
    return list((await client.post(str(client.base_url.join("/tokenize")), cast_to=dict, body=body))["tokens"])


async def _turn(client: Any, oracle: TrieOracle, messages: list[dict[str, str]], turn: int, max_tokens: int) -> Reply:
    prompt = await _tokenize(client, messages)
    predicted = oracle.predict(prompt)
    start = time.perf_counter()
    stamps: list[float] = []
    ids: list[int] = []
    text, usage = "", None
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
    stream = await client.chat.completions.create(model="default", messages=messages, max_tokens=max_tokens, temperature=0.0, **options)
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            ids += (choice.model_extra or {}).get("token_ids") or []
            if choice.delta.content:
                stamps.append(time.perf_counter())
                text += choice.delta.content
    assert usage is not None
    assert len(ids) == usage.completion_tokens, (len(ids), usage)
    # The last drawn token is never fed back, so its K/V does not exist: prompt + output - 1 tokens are in the tree.
    oracle.insert((prompt + ids)[:-1])
    messages.append({"role": "assistant", "content": text})
    ttft = (stamps[0] if stamps else time.perf_counter()) - start
    tpot = (stamps[-1] - stamps[0]) / max(usage.completion_tokens - 1, 1) if len(stamps) > 1 else 0.0
    return Reply(turn, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens, predicted, ttft, tpot)


async def drive(base: str, questions: list[list[str]], *, concurrency: int, max_tokens: int, page_size: int) -> tuple[list[Reply], float]:
    """All chats, at most `concurrency` at a time; returns replies and the wall time in seconds."""
    import openai

    oracle, gate, replies = TrieOracle(page_size), asyncio.Semaphore(concurrency), list[Reply]()
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", timeout=600, max_retries=0) as client:

        async def chat(turns: list[str]) -> None:
            async with gate:
                messages: list[dict[str, str]] = []
                for number, text in enumerate(turns, 1):
                    messages.append({"role": "user", "content": text})
                    replies.append(await _turn(client, oracle, messages, number, max_tokens))

        start = time.perf_counter()
        await asyncio.gather(*(chat(q) for q in questions))
        return replies, time.perf_counter() - start


def _row(label: str, replies: list[Reply], wall_s: float) -> str:
    ttft = sorted(r.ttft_s for r in replies)
    outputs = sum(r.output_len for r in replies)
    cells = [
        label,
        str(len(replies)),
        str(sum(r.prompt_len for r in replies)),
        str(sum(r.cached_len for r in replies)),
        f"{statistics.median(ttft):.3f} / {ttft[int(0.95 * len(ttft))]:.3f}",
        f"{statistics.median(r.tpot_s for r in replies):.4f}",
        f"{outputs / wall_s:.1f}",
        f"{wall_s:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table for cache on and off, then how many second turns agreed with the oracle; exit 1 when one did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path, help="folder with mt_bench_question.jsonl")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--chats", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args()
    lines = (options.data / "mt_bench_question.jsonl").read_text().splitlines()
    questions = [json.loads(line)["turns"] for line in lines][: options.chats]
    print("| cache | replies | prompt tokens | cached tokens | TTFT p50 / p95 s | TPOT p50 s | output tok/s | wall s |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = 0
    for label, flag in (("on", "--prefix-cache"), ("off", "--no-prefix-cache")):
        with running_server(flag, "--page-size", str(options.page_size), "--no-log-requests") as server:
            run = drive(server.base, questions, concurrency=options.concurrency, max_tokens=options.max_tokens, page_size=options.page_size)
            replies, wall_s = asyncio.run(run)
        print(_row(label, replies, wall_s), flush=True)
        if label == "on":
            second = [r for r in replies if r.turn == 2]
            wrong = sum(r.cached_len != r.predicted_len for r in second)
            verdict = f"second turns: {len(second)}, cached_tokens as the oracle predicts: {len(second) - wrong}"
    print(verdict)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
