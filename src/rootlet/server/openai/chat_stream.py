"""The stream of a chat completion, and what one choice of it remembers.

The order of the frames is what client accumulators need: the role of every choice first, in order; then content; one empty final delta a choice; the
usage chunk if asked for. Frames are byte templates: per event only the delta is encoded. Source: docs/api.md, "Streaming".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from rootlet.core.types import Finish, TokenLogprob
from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.server.context import ServerContext
from rootlet.server.errors import raise_failure
from rootlet.server.events import open_events
from rootlet.server.generation import Common
from rootlet.server.openai.logprobs import Aligner, TokenTexts, chat_entries, prompt_logprobs_json
from rootlet.server.openai.protocol import UsageMeter, finish_reason, frame_head


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A parsed request: the internal one, and what its reply needs. `top_n` None = no logprobs. `prompt_ids` only if the reply shows them."""

    req: GenerateReq
    common: Common
    top_n: int | None
    prompt_ids: tuple[int, ...] | None
    service_tier: str | None


class ChoiceLogprobs:
    """The logprob state of one choice."""

    def __init__(self, context: ServerContext, chat: ChatRequest) -> None:
        skip = chat.req.sampling.skip_special_tokens
        self._tokenizer = context.manager.tokenizer
        self._top_n = chat.top_n
        self._aligner = Aligner(self._tokenizer, skip_special_tokens=skip)
        self._texts = TokenTexts(self._tokenizer, skip_special_tokens=skip)
        self.held_ids: list[int] = []

    def logprobs(self, entries: Sequence[TokenLogprob], text: str, *, finished: bool, matched: str | int | None = None) -> dict[str, Any] | None:
        if self._top_n is None:
            return None
        ready = self._aligner.push(entries, text, finished=finished, matched=matched)
        final = finished and not isinstance(matched, str)
        return {"content": chat_entries(self._tokenizer, self._texts, ready, self._top_n, final=final), "refusal": None}


class _Frames:
    """Renders the frames of one chat stream from byte templates: only the delta is encoded per event."""

    def __init__(self, context: ServerContext, chat: ChatRequest) -> None:
        self._chat = chat
        self._tokenizer = context.manager.tokenizer
        common = chat.common
        self._head = frame_head(context, rid=common.rid, kind="chat.completion.chunk", created=context.now_unix(), model=common.model)
        self._choice = self._head + b'"choices":[{"index":'
        self._states = [ChoiceLogprobs(context, chat) for _ in range(chat.req.sampling.n)]
        self._prompt: tuple[TokenLogprob, ...] | None = None
        self.usage = UsageMeter(common, 1)

    def roles(self) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        extra = b"" if self._chat.prompt_ids is None else b',"prompt_token_ids":' + orjson.dumps(self._chat.prompt_ids)
        ends = [delta + (extra if k == 0 else b"") + self.usage.part() + b"}\n\n" for k in range(len(self._states))]
        return b"".join(self._choice + b"%d" % k + end for k, end in enumerate(ends))

    def event(self, chunk: GenerateChunk) -> bytes:
        """The frames of one event: a content chunk when there is text, and the terminal chunk when the choice ends."""
        self.usage.update(0, chunk)
        self._prompt = chunk.prompt_logprobs if chunk.prompt_logprobs is not None else self._prompt
        state = self._states[chunk.index]
        state.held_ids.extend(chunk.token_ids)
        finish = chunk.finish
        matched = finish.matched if finish else None
        logprobs = b"null"
        if self._chat.top_n is not None:
            entries = state.logprobs(chunk.logprobs, chunk.text, finished=finish is not None, matched=matched)
            if entries is not None and entries["content"]:
                logprobs = orjson.dumps(entries)
        out = b""
        if chunk.text or (finish is None and logprobs != b"null"):
            delta = b',"delta":{"content":' + orjson.dumps(chunk.text) + b'},"logprobs":' + logprobs + b',"finish_reason":null'
            out = self._frame(chunk.index, delta + self._ids(state), b"")
            logprobs = b"null"
        return out if finish is None else out + self._terminal(chunk, finish, logprobs, self._ids(state))

    def _frame(self, index: int, middle: bytes, end: bytes) -> bytes:
        return self._choice + b"%d" % index + middle + b"}]" + end + self._prompt_part() + self.usage.part() + b"}\n\n"

    def _ids(self, state: ChoiceLogprobs) -> bytes:
        """The extension `token_ids`: those that have not gone out."""
        if not self._chat.common.return_token_ids:
            return b""
        ids, state.held_ids = state.held_ids, []
        return b',"token_ids":' + orjson.dumps(ids)

    def _prompt_part(self) -> bytes:
        """The extension `prompt_logprobs`, once, on the first frame that there is."""
        top_n = self._chat.common.prompt_top_n
        entries, self._prompt = self._prompt, None
        if top_n is None or entries is None:
            return b""
        return b',"prompt_logprobs":' + orjson.dumps(prompt_logprobs_json(self._tokenizer, entries, top_n))

    def _terminal(self, chunk: GenerateChunk, finish: Finish, logprobs: bytes, ids: bytes) -> bytes:
        matched = orjson.dumps(finish.matched)
        reason = orjson.dumps(finish_reason(finish))
        middle = b',"delta":{},"logprobs":' + logprobs + b',"finish_reason":' + reason + b',"stop_reason":' + matched + b',"matched_stop":' + matched
        return self._frame(chunk.index, middle + ids, b',"seed":' + orjson.dumps(chunk.seed))

    def tail(self) -> bytes:
        return self.usage.final(self._head)


async def chat_frames(context: ServerContext, chat: ChatRequest) -> AsyncGenerator[bytes, None]:
    """The stream but for `[DONE]`. Raises `RootletError`: before the first frame it becomes a status, afterwards an error frame."""
    frames = _Frames(context, chat)
    is_first = True
    async with aclosing(open_events(context, [chat.req])) as events:
        async for _, chunk in events:
            raise_failure(chunk.finish)
            body = frames.event(chunk)
            if is_first:
                body, is_first = frames.roles() + body, False
            if body:
                yield body
    tail = frames.tail()
    if tail:
        yield tail
