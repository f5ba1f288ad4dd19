"""From one request, or a batch of them, to one stream of `(prompt index, GenerateChunk)`, and what every dialect does with it: watch for the client
going away, collect whole answers, turn a failed generation into an error.

Owns the generators it opens: they are closed, and so the requests aborted, on every way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.types import Receive

from rootlet.core.errors import RequestFailed
from rootlet.core.types import Finish, TokenLogprob
from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.ipc.messages import ReqStats
from rootlet.server.body import ClientGone
from rootlet.server.context import ServerContext
from rootlet.server.errors import raise_failure

T = TypeVar("T")
Event = tuple[int, GenerateChunk]
MERGE_BUFFER = 256


async def wait_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client leaves. Raises `ClientGone` then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for child in (task, gone):
            child.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def open_events(context: ServerContext, reqs: Sequence[GenerateReq]) -> AsyncGenerator[Event, None]:
    """Starts the requests; their events in order of arrival. Raises `RootletError` from the first `anext` when one is refused."""
    if len(reqs) == 1:
        return _single(context, reqs[0])
    return _merged(context, reqs)


def metered(context: ServerContext, req: GenerateReq) -> AsyncGenerator[GenerateChunk, None]:
    # The door says AsyncIterator; it is an async generator, and closing it is what aborts.
    return context.meters.observe(cast("AsyncGenerator[GenerateChunk, None]", context.manager.generate(req)), context.clock)


async def _single(context: ServerContext, req: GenerateReq) -> AsyncGenerator[Event, None]:
    async with aclosing(metered(context, req)) as chunks:
        async for chunk in chunks:
            yield 0, chunk


async def _merged(context: ServerContext, reqs: Sequence[GenerateReq]) -> AsyncGenerator[Event, None]:
    queue: asyncio.Queue[Event | None] = asyncio.Queue(MERGE_BUFFER)

    async def pump(i: int, req: GenerateReq) -> None:
        async with aclosing(metered(context, req)) as chunks:
            async for chunk in chunks:
                await queue.put((i, chunk))
        await queue.put(None)

    tasks = [asyncio.ensure_future(pump(i, req)) for i, req in enumerate(reqs)]
    refused = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
    try:
        num_open = len(tasks)
        while num_open:
            item = queue.get_nowait() if not queue.empty() else await _next_or_failure(queue, refused)
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in (*tasks, refused):
            task.cancel()
        await asyncio.gather(*tasks, refused, return_exceptions=True)


async def _next_or_failure(
    queue: asyncio.Queue[Event | None], refused: asyncio.Task[tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]]
) -> Event | None:
    """The next event; or the error of the first request that was refused."""
    getter = asyncio.ensure_future(queue.get())
    try:
        either: set[asyncio.Future[Any]] = {getter, refused}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not getter.done():
            for task in refused.result()[0]:
                task.result()
            return await getter
        return getter.result()
    finally:
        getter.cancel()


@dataclass(slots=True)
class Answer:
    """One finished choice, put together from its chunks."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    prompt_len: int = 0
    completion_len: int = 0
    cached_len: int = 0
    stats: ReqStats | None = None
    seed: int | None = None
    rid: str = ""

    def add(self, chunk: GenerateChunk) -> None:
        """Raises `RootletError` for a chunk that ends the choice by failure."""
        raise_failure(chunk.finish)
        self.text.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.prompt_logprobs = chunk.prompt_logprobs if chunk.prompt_logprobs is not None else self.prompt_logprobs
        self.finish = chunk.finish
        self.prompt_len, self.completion_len, self.cached_len = chunk.prompt_len, chunk.completion_len, chunk.cached_len
        self.stats = chunk.stats or self.stats
        self.seed = chunk.seed if chunk.seed is not None else self.seed
        self.rid = chunk.rid or self.rid


async def collect(context: ServerContext, reqs: Sequence[GenerateReq]) -> list[list[Answer]]:
    """Runs the requests to their end: `[prompt][choice]`. Raises `RootletError` as soon as one fails; the others are aborted then."""
    answers = [[Answer() for _ in range(req.sampling.n)] for req in reqs]
    async with aclosing(open_events(context, reqs)) as events:
        async for i, chunk in events:
            answers[i][chunk.index].add(chunk)
    if any(answer.finish is None for group in answers for answer in group):
        raise RequestFailed("the engine ended the request without a terminal message")
    return answers
