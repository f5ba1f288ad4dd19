"""`ReqState`: what the front knows of one request between its arrival and its terminal messages. Written by `TokenizerManager` only.

A slow reader costs bounded memory: outputs that nobody took yet are merged into one pending chunk a choice, never queued. Text is joined when
it is taken, so a step costs O(new text). A detached state (its reader left) stays in the table until the scheduler's echo, so that an abort is
never lost and a rid never names two requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rootlet.core.types import Finish, TokenLogprob
from rootlet.frontend.types import GenerateChunk
from rootlet.ipc.messages import ReqStats, StrOutput


@dataclass(slots=True)
class ChoiceState:
    """One choice. `wire_rid` names it on the wire; `finish` is set once; `taken` = its terminal chunk was handed to the reader."""

    index: int
    wire_rid: str
    seed: int
    prompt_len: int = 0
    completion_len: int = 0
    cached_len: int = 0
    finish: Finish | None = None
    taken: bool = False
    stats: ReqStats | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fresh: bool = False
    arrived_s: float = 0.0
    first_s: float | None = None

    def add(self, out: StrOutput, now_s: float) -> None:
        """Merge one output. A stop string ends a request before the scheduler could send its account: then the front's clock gives one."""
        self.texts.append(out.text)
        self.token_ids += out.token_ids
        if out.logprobs:
            self.logprobs += out.logprobs
        self.prompt_len = out.prompt_len or self.prompt_len
        self.completion_len = max(self.completion_len, out.completion_len)
        self.cached_len = max(self.cached_len, out.cached_len)
        self.prompt_logprobs = out.prompt_logprobs if out.prompt_logprobs is not None else self.prompt_logprobs
        self.first_s = now_s if self.first_s is None else self.first_s
        self.finish = out.finish
        self.stats = out.stats or self.stats
        if self.finish is not None and self.stats is None:
            self.stats = ReqStats(ttft_s=self.first_s - self.arrived_s, e2e_s=now_s - self.arrived_s, cached_device_len=self.cached_len)
        self.fresh = True

    def end(self, finish: Finish) -> None:
        """A terminal that the front itself decides on. A finished choice stays as it is."""
        if self.finish is None:
            self.finish = finish
            self.fresh = True

    def take(self, rid: str) -> GenerateChunk | None:
        """Everything since the last take as one chunk; the state forgets it."""
        if not self.fresh:
            return None
        chunk = GenerateChunk(
            index=self.index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            prompt_len=self.prompt_len,
            completion_len=self.completion_len,
            cached_len=self.cached_len,
            finish=self.finish,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
            stats=self.stats,
            seed=self.seed,
            rid=rid,
        )
        self.texts, self.token_ids, self.logprobs, self.prompt_logprobs = [], [], [], None
        self.fresh = False
        self.taken = self.finish is not None
        return chunk


@dataclass(slots=True)
class ReqState:
    """One request and its choices, and the batch it is of. `dispatched`: the scheduler knows it; `detached`: nobody reads any more."""

    rid: str
    choices: tuple[ChoiceState, ...]
    batch_rid: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    dispatched: bool = False
    detached: bool = False
    abort_reason: str | None = None

    @property
    def open_choices(self) -> list[ChoiceState]:
        return [c for c in self.choices if c.finish is None]

    @property
    def all_taken(self) -> bool:
        return all(c.taken for c in self.choices)

    def take(self) -> list[GenerateChunk]:
        """Pending chunks, one a choice at most, in choice order."""
        self.changed.clear()
        return [chunk for c in self.choices if (chunk := c.take(self.rid)) is not None]

    def end_all(self, finish: Finish) -> None:
        for choice in self.choices:
            choice.end(finish)
        self.changed.set()
