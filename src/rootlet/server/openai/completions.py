"""`POST /v1/completions`: one prompt or a batch of them, each with n choices; choice index = prompt index * n + k.

A pure dialect over `GenerateReq` and `GenerateChunk`. All prompts are checked before the first starts; when one fails, the others are aborted and the
request fails as a whole. In a stream the last chunk of a choice carries its finish reason. Source: docs/api.md.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rootlet.core.errors import Unsupported
from rootlet.core.sampling_params import MAX_TEMPERATURE
from rootlet.core.types import TokenLogprob
from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.server.context import ServerContext, tenant_of
from rootlet.server.errors import raise_failure
from rootlet.server.events import Answer, collect, open_events, until_gone
from rootlet.server.fields import Fields
from rootlet.server.generation import Common, generate_req, read_common
from rootlet.server.openai.chat import refuse_unsupported
from rootlet.server.openai.logprobs import Aligner, CompletionLogprobs, join, prompt_logprobs_json
from rootlet.server.openai.protocol import (
    UsageMeter,
    counts_of,
    finish_reason,
    frame_head,
    logprob_spec,
    max_logprobs_field,
    required,
    usage,
)
from rootlet.server.prompts import Prompt, check_prompts, read_prompts
from rootlet.server.sampling import MaxTokens, read_sampling
from rootlet.server.sse import stream_reply

DEFAULT_MAX_TOKENS = 16
_PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """`echoes[i]` = the text that is put before the choices of prompt i, None without echo. `top_n` None = no logprobs."""

    reqs: list[GenerateReq]
    prompts: list[Prompt]
    echoes: list[str | None]
    common: Common
    top_n: int | None
    as_ids: bool
    n: int


async def create_completion(context: ServerContext, request: Request) -> Response:
    """Raises `RootletError` for everything that can be said before the first token."""
    context.require_ready()
    completion = await parse_completion(await context.read_fields(request), context, tenant=tenant_of(request))
    if completion.common.stream:
        return await stream_reply(context, request, completion_frames(context, completion), keepalive_s=completion.common.keepalive_s)
    answers = await until_gone(request, collect(context, completion.reqs))
    return Response(orjson.dumps(completion_reply(context, completion, answers)), media_type="application/json")


async def parse_completion(fields: Fields, context: ServerContext, *, tenant: str | None = None) -> CompletionRequest:
    """Everything that can be refused without the engine is refused here."""
    common = read_common(fields, context, prefix="cmpl-", tenant=tenant)
    echo = fields.boolean("echo")
    zero_ok = echo or common.prompt_top_n is not None
    length = MaxTokens(names=("max_completion_tokens", "max_tokens"), default=DEFAULT_MAX_TOKENS, zero_ok=zero_ok)
    sampling = read_sampling(fields, context.limits(max_temperature=MAX_TEMPERATURE), length)
    refuse_unsupported(fields)
    if fields.string("suffix"):
        raise Unsupported("suffix (fill in the middle) is not supported by this server", param=fields.param("suffix"))
    top_n = max_logprobs_field(fields, "logprobs", context.config.server.max_logprobs)
    add_special = fields.boolean("add_special_tokens", default=True)
    prompts = read_prompts(required(fields, "prompt", _PROMPT_KINDS), fields.param("prompt"), context, n=sampling.n)
    prompts = await check_prompts(prompts, context, add_special_tokens=add_special, tokenize=common.return_token_ids)
    spec = logprob_spec(top_n, prompt=echo and top_n is not None, common=common)
    reqs = []
    for i, prompt in enumerate(prompts):
        names = {"rid": common.rid} if len(prompts) == 1 else {"rid": f"{common.rid}-{i}", "batch_rid": common.rid}
        arguments = common.request(sampling=sampling, logprobs=spec, param=prompt.param, **names)
        reqs.append(generate_req(prompt.content, arguments, add_special_tokens=add_special))
    return CompletionRequest(
        reqs=reqs,
        prompts=prompts,
        echoes=[_echo_text(prompt, context) if echo else None for prompt in prompts],
        common=common,
        top_n=top_n,
        as_ids=fields.boolean("return_tokens_as_token_ids"),
        n=sampling.n,
    )


def _echo_text(prompt: Prompt, context: ServerContext) -> str:
    if prompt.text is not None:
        return prompt.text
    return context.manager.tokenizer.decode(list(prompt.ids or ()), skip_special_tokens=False)


class _Choice:
    """What one choice remembers between its chunks: its echo, its logprobs, the ids that have not gone out."""

    def __init__(self, context: ServerContext, completion: CompletionRequest, prompt_index: int) -> None:
        skip = completion.reqs[0].sampling.skip_special_tokens
        tokenizer = context.manager.tokenizer
        self.echo = completion.echoes[prompt_index] or ""
        self.with_echo = completion.echoes[prompt_index] is not None
        self.aligner = Aligner(tokenizer, skip_special_tokens=skip)
        self.render = CompletionLogprobs(tokenizer, top_n=completion.top_n or 0, skip_special_tokens=skip, as_ids=completion.as_ids)
        self.held_ids: list[int] = []

    def delta(self, entries: Any, text: str, finish: Any, prompt: tuple[TokenLogprob, ...] | None) -> dict[str, Any]:
        """Logprobs of the next piece of text; `prompt` = those of the echoed prompt, with the first piece."""
        matched = finish.matched if finish else None
        ready = self.aligner.push(entries, text, finished=finish is not None, matched=matched)
        final = finish is not None and not isinstance(matched, str)
        if prompt is None:
            return self.render.delta(ready, final=final)
        echoed = self.render.prompt(prompt, self.echo)
        return join([echoed, self.render.delta(ready, final=final)])


def completion_reply(context: ServerContext, completion: CompletionRequest, answers: list[list[Answer]]) -> dict[str, Any]:
    """The `text_completion` object."""
    choices: list[dict[str, Any]] = []
    for i, group in enumerate(answers):
        for answer in group:
            choice = _choice_json(context, completion, i, answer, prompt=group[0].prompt_logprobs)
            choices.append({"index": len(choices), **choice})
    return {
        "id": completion.common.rid,
        "object": "text_completion",
        "created": context.now_unix(),
        "model": completion.common.model,
        "choices": choices,
        "usage": usage([counts_of(group) for group in answers]),
        "system_fingerprint": context.system_fingerprint,
        "seed": answers[0][0].seed,
    }


def _choice_json(
    context: ServerContext, completion: CompletionRequest, i: int, answer: Answer, *, prompt: tuple[TokenLogprob, ...] | None
) -> dict[str, Any]:
    assert answer.finish is not None
    state = _Choice(context, completion, i)
    text = "".join(answer.text)
    logprobs = None
    if completion.top_n is not None:
        logprobs = state.delta(answer.logprobs, text, answer.finish, prompt if state.with_echo else None)
    choice: dict[str, Any] = {
        "text": state.echo + text,
        "logprobs": logprobs,
        "finish_reason": finish_reason(answer.finish),
        "stop_reason": answer.finish.matched,
        "matched_stop": answer.finish.matched,
        "seed": answer.seed,
    }
    if completion.common.prompt_top_n is not None:
        choice["prompt_logprobs"] = prompt_logprobs_json(context.manager.tokenizer, prompt, completion.common.prompt_top_n)
    if completion.common.return_token_ids:
        choice |= {"token_ids": answer.token_ids, "prompt_token_ids": completion.prompts[i].ids}
    return choice


class _Frames:
    """Renders the frames of one completion stream: only text and logprobs are encoded per event."""

    def __init__(self, context: ServerContext, completion: CompletionRequest) -> None:
        common = completion.common
        self._completion = completion
        self._tokenizer = context.manager.tokenizer
        self._head = frame_head(context, rid=common.rid, kind="text_completion", created=context.now_unix(), model=common.model)
        self._choice = self._head + b'"choices":[{"index":'
        self._states = [_Choice(context, completion, i) for i in range(len(completion.reqs)) for _ in range(completion.n)]
        self._prompts: list[tuple[TokenLogprob, ...] | None] = [None] * len(completion.reqs)
        self._waiting: list[list[GenerateChunk]] = [[] for _ in completion.reqs]
        self._started = [False] * len(self._states)
        self._needs_prompt = completion.top_n is not None and completion.echoes[0] is not None
        self.usage = UsageMeter(common, len(completion.reqs))

    def event(self, i: int, chunk: GenerateChunk) -> bytes:
        """The frames of one event. With echo and logprobs, choices wait for the prompt's logprobs, which come with choice 0."""
        self.usage.update(i, chunk)
        if chunk.prompt_logprobs is not None:
            self._prompts[i] = chunk.prompt_logprobs
        if self._needs_prompt and self._prompts[i] is None and not any(self._started[i * self._completion.n : (i + 1) * self._completion.n]):
            self._waiting[i].append(chunk)
            return b""
        ready, self._waiting[i] = [*self._waiting[i], chunk], []
        return b"".join(self._one(i, item) for item in ready)

    def _one(self, i: int, chunk: GenerateChunk) -> bytes:
        index = i * self._completion.n + chunk.index
        state = self._states[index]
        state.held_ids.extend(chunk.token_ids)
        is_first = not self._started[index]
        text = state.echo + chunk.text if is_first else chunk.text
        logprobs = b"null"
        has_logprobs = False
        if self._completion.top_n is not None:
            prompt = self._prompts[i] if is_first and state.with_echo else None
            part = state.delta(chunk.logprobs, chunk.text, chunk.finish, prompt)
            has_logprobs = bool(part["tokens"])
            logprobs = orjson.dumps(part) if has_logprobs else logprobs
        if not text and not has_logprobs and chunk.finish is None:
            return b""
        self._started[index] = True
        end = b"}]" + (b',"seed":' + orjson.dumps(chunk.seed) if chunk.finish else b"") + self.usage.part() + b"}\n\n"
        middle = b',"text":' + orjson.dumps(text) + b',"logprobs":' + logprobs + b',"finish_reason":'
        return self._choice + b"%d" % index + middle + self._finish(chunk) + self._extensions(i, index, is_first=is_first) + end

    def _finish(self, chunk: GenerateChunk) -> bytes:
        if chunk.finish is None:
            return b"null"
        matched = orjson.dumps(chunk.finish.matched)
        return orjson.dumps(finish_reason(chunk.finish)) + b',"stop_reason":' + matched + b',"matched_stop":' + matched

    def _extensions(self, i: int, index: int, *, is_first: bool) -> bytes:
        common = self._completion.common
        out = b""
        if common.return_token_ids:
            state = self._states[index]
            out += b',"token_ids":' + orjson.dumps(state.held_ids)
            state.held_ids = []
            if is_first:
                out += b',"prompt_token_ids":' + orjson.dumps(self._completion.prompts[i].ids)
        if is_first and common.prompt_top_n is not None:
            out += b',"prompt_logprobs":' + orjson.dumps(prompt_logprobs_json(self._tokenizer, self._prompts[i], common.prompt_top_n))
        return out

    def tail(self) -> bytes:
        return self.usage.final(self._head)


async def completion_frames(context: ServerContext, completion: CompletionRequest) -> AsyncGenerator[bytes, None]:
    """The stream but for `[DONE]`. Raises `RootletError`: before the first frame it becomes a status, afterwards an error frame."""
    frames = _Frames(context, completion)
    async with aclosing(open_events(context, completion.reqs)) as events:
        async for i, chunk in events:
            raise_failure(chunk.finish)
            body = frames.event(i, chunk)
            if body:
                yield body
    tail = frames.tail()
    if tail:
        yield tail
