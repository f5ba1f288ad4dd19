"""The measurements of `make bench`, each as "ours" and "theirs": tokens a second, larger is better.

Ours is the whole runtime in one process (scheduler, radix cache, sampling, detokenising); the peer computes the same tokens. Owns the prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from rootlet.bench.llamacpp import LlamaCpp
from rootlet.core.sampling_params import SamplingParams
from rootlet.engine.engine import Engine
from rootlet.frontend.types import GenerateReq

PROMPT, DEEP, SHARED, DECODE_CONTEXT = 512, 2048, 1500, 128
SETTLE = 24  # tokens that the first rows draw while the last ones are still being admitted


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` rows at `context` positions; prefills compute PROMPT tokens of one row."""

    name: str
    batch: int
    context: int
    prefill: bool
    ours: Callable[[], float]
    theirs: Callable[[LlamaCpp], float]


def prompt(salt: int, length: int) -> tuple[int, ...]:
    return tuple((7 * i + 131 * salt) % 40000 + 5 for i in range(length))


class Ours:
    """One engine; every call uses prompts that no earlier one used, so only what is meant to hit the cache does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._salt: Iterator[int] = count(1)

    def prefill(self, cached: int) -> float:
        """Tokens a second of PROMPT new tokens behind `cached` ones that are in the cache."""
        head, tail = prompt(0, cached), prompt(next(self._salt), PROMPT)
        if cached:
            self._run([head], 1)
        start = time.perf_counter()
        self._run([head + tail], 1)
        return PROMPT / (time.perf_counter() - start)

    def decode(self, batch: int, steps: int, *, shared: int = 0) -> float:
        """Tokens a second from the last row's first token to the first row's last one."""
        head = prompt(0, shared)
        if shared:
            self._run([head], 1)
        length = 16 if shared else DECODE_CONTEXT
        stamps = self._run([head + prompt(next(self._salt), length) for _ in range(batch)], steps + SETTLE)
        begin, end = max(s[0] for s in stamps), min(s[-1] for s in stamps)
        return sum(begin < t <= end for s in stamps for t in s) / (end - begin)

    def _run(self, prompts: list[tuple[int, ...]], tokens: int) -> list[list[float]]:
        """When each token of each prompt came out."""
        return self.engine.run(self._all(prompts, SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)))

    async def _all(self, prompts: list[tuple[int, ...]], sampling: SamplingParams) -> list[list[float]]:
        return list(await asyncio.gather(*(self._one(p, sampling) for p in prompts)))

    async def _one(self, ids: tuple[int, ...], sampling: SamplingParams) -> list[float]:
        stamps: list[float] = []
        async for chunk in self.engine.manager.generate(GenerateReq(input_ids=ids, sampling=sampling, stream=True)):
            stamps += [time.perf_counter()] * len(chunk.token_ids)
        return stamps


def _their_prefill(peer: LlamaCpp, cached: int) -> float:
    peer.clear()
    if cached:
        peer.prefill(prompt(0, cached))
    return PROMPT / peer.prefill(prompt(1, PROMPT), start=cached)


def _their_decode(peer: LlamaCpp, batch: int, steps: int, shared: int) -> float:
    peer.clear()
    if shared:
        peer.prefill(prompt(0, shared))
        peer.share(batch)
    else:
        for s in range(batch):
            peer.prefill(prompt(s, DECODE_CONTEXT), sequence=s)
    return batch * steps / peer.decode(steps, start=shared or DECODE_CONTEXT, sequences=batch)


def workloads(ours: Ours, *, batches: tuple[int, ...]) -> list[Workload]:
    found = [
        Workload("prefill 512", 1, 0, True, lambda: ours.prefill(0), lambda peer: _their_prefill(peer, 0)),
        Workload(f"prefill 512 at {DEEP}", 1, DEEP, True, lambda: ours.prefill(DEEP), lambda peer: _their_prefill(peer, DEEP)),
    ]
    for batch in batches:
        found.append(_decode(ours, f"decode batch {batch}", batch, steps=max(16, 64 // batch), shared=0))
    found.append(_decode(ours, f"decode batch 16 over a shared prefix of {SHARED}", 16, steps=16, shared=SHARED))
    return found


def _decode(ours: Ours, name: str, batch: int, *, steps: int, shared: int) -> Workload:
    return Workload(
        name,
        batch,
        (shared or DECODE_CONTEXT) + steps // 2,
        False,
        lambda: ours.decode(batch, steps, shared=shared),
        lambda peer: _their_decode(peer, batch, steps, shared),
    )
