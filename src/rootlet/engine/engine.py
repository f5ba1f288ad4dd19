"""`Engine`: the offline Python API. The whole runtime in this process, no HTTP, no signal handlers, no configuration from the environment.

    with rootlet.Engine("model.gguf", ctx_len=4096) as engine:
        print(engine.generate("The capital of France is", {"max_tokens": 8, "temperature": 0}).text)

The front runs on an event loop in a thread of its own, the scheduler in another; calls from any thread and from any event loop are fine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from rootlet.config.load import load_config
from rootlet.config.resolve import num_usable_cores, resolve_config
from rootlet.config.schema import RuntimeConfig
from rootlet.core import env
from rootlet.core.errors import InvalidValue, RootletError
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import LogprobSpec
from rootlet.engine.arguments import checked, messages_of, requests_of, sampling_of, token_ids_of
from rootlet.engine.inproc import InprocRuntime
from rootlet.engine.loop_thread import LoopThread
from rootlet.engine.model_side import FrontModel, LoadedExecutor, load_executor, load_front
from rootlet.engine.results import GenerateResult, results_of
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.frontend.types import GenerateChunk, GenerateReq

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Sampling = Mapping[str, Any] | SamplingParams | None
Logprobs = int | LogprobSpec | None
Results = GenerateResult | list[GenerateResult] | list[list[GenerateResult]]

DEFAULT_MAX_TOKENS = 128  # as /generate: text that is continued seldom ends by itself
MAX_FLUSH_S = 600.0


class Engine:
    """`model` as for `rootlet serve` (None = the default model); keywords are the flags with underscores. Raises `BadConfig`, `BadModelFile`.

    Read-only: `config` (resolved), `manager` (the front; use it through `run`), `closed`.
    One prompt gives one `GenerateResult`, or with n > 1 a list of n; a list of prompts gives a list of those, in order.
    """

    def __init__(self, model: str | Path | None = None, **knobs: Any) -> None:
        config = load_config({"model": model, **knobs}, {}, None)[0]
        self._start(resolve_config(config, num_cores=num_usable_cores())[0], None)

    @classmethod
    def over(cls, config: RuntimeConfig, loaded: LoadedExecutor, front: FrontModel) -> Self:
        """An engine over parts that are already loaded: any executor, any tokenizer. `config` may hold "auto"."""
        engine = cls.__new__(cls)
        engine._start(resolve_config(config, num_cores=num_usable_cores())[0], (loaded, front))
        return engine

    def _start(self, config: RuntimeConfig, parts: tuple[LoadedExecutor, FrontModel] | None) -> None:
        self.config = config
        loaded, front = parts or _load(config)
        self._runtime = InprocRuntime(config, loaded, front)
        self.closed = False
        self._loop = LoopThread("rootlet-front")
        self.manager: TokenizerManager = self.run(self._runtime.__aenter__())
        if self.manager.status != "ready":
            reason = self.manager.health()[1]
            self.close()
            raise RootletError(reason)

    # -- generating -------------------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling = None, *, stream: Literal[False] = False, logprobs: Logprobs = None, **request: Any
    ) -> Results: ...
    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling = None, *, stream: Literal[True], logprobs: Logprobs = None, **request: Any
    ) -> Iterator[GenerateChunk]: ...
    def generate(
        self, prompt: Prompt, sampling: Sampling = None, *, stream: bool = False, logprobs: Logprobs = None, **request: Any
    ) -> Results | Iterator[GenerateChunk]:
        """Text or token ids in, results out; `stream=True` gives the chunks of one prompt as they come.

        `sampling` that says nothing of max_tokens means 128 of them; {"max_tokens": None}, or a `SamplingParams`, what the context leaves.

        `logprobs` = alternatives a token (0 = the chosen one only), or a `LogprobSpec`, which can ask for those of the prompt.
        `request`: add_special_tokens, rid, cache_salt, extra_key, priority, deadline_s, user, routing_key.
        Raises `InvalidValue` (`param` names the argument), `ContextOverflow`, `PoolOverflow`, `QueueFull`, `DeadlineExceeded`, `Unavailable`,
        `RequestFailed`.
        """
        reqs, many = _requests(self, prompt, sampling, logprobs, stream=stream, request=request)
        if stream:
            return _stream(self, reqs[0])
        return _shape(self.run(_all(self.manager, reqs)), many, reqs[0].sampling.n)

    async def agenerate(self, prompt: Prompt, sampling: Sampling = None, *, logprobs: Logprobs = None, **request: Any) -> Results:
        """As `generate`, awaitable on any event loop. Cancelling it aborts the request."""
        reqs, many = _requests(self, prompt, sampling, logprobs, stream=False, request=request)
        return _shape(await self._loop.awaited(_all(self.manager, reqs)), many, reqs[0].sampling.n)

    async def astream(self, prompt: Prompt, sampling: Sampling = None, *, logprobs: Logprobs = None, **request: Any) -> AsyncIterator[GenerateChunk]:
        """Chunks of one prompt, on any event loop. Leaving the loop aborts the request."""
        chunks = self.manager.generate(_requests(self, prompt, sampling, logprobs, stream=True, request=request)[0][0])
        try:
            while (chunk := await self._loop.awaited(_next(chunks))) is not None:
                yield chunk
        finally:
            await self._loop.awaited(_close(chunks))

    @overload
    def chat(self, messages: Sequence[dict[str, Any]], sampling: Sampling = None, *, stream: Literal[False] = False, **template: Any) -> Results: ...
    @overload
    def chat(
        self, messages: Sequence[dict[str, Any]], sampling: Sampling = None, *, stream: Literal[True], **template: Any
    ) -> Iterator[GenerateChunk]: ...
    def chat(
        self, messages: Sequence[dict[str, Any]], sampling: Sampling = None, *, stream: bool = False, **template: Any
    ) -> Results | Iterator[GenerateChunk]:
        """The model's chat template over `messages`, then `generate`, but until the model stops: max_tokens is by default what the context leaves.

        `template`: tools, continue_final_message, template variables. Raises as `generate`, and `TemplateError` with the template's words.
        """
        prompt = self.manager.chat_template.render(messages_of(messages, template), **template)
        request = {"add_special_tokens": False}
        reqs, _ = _requests(self, prompt, sampling, None, stream=stream, request=request, max_tokens=None, param="messages")
        return _stream(self, reqs[0]) if stream else _shape(self.run(_all(self.manager, reqs)), False, reqs[0].sampling.n)

    # -- text, cache, state -----------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `InvalidValue`."""
        checked("text", text, str)
        return list(self.manager.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raises `InvalidValue` for what is no token id of this model."""
        ids = token_ids_of("token_ids", token_ids, self.manager.tokenizer.vocab_size)
        return str(self.manager.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def flush_cache(self, timeout_s: float = 10.0) -> bool:
        """Forget every cached prefix once nothing runs; False when that did not happen within `timeout_s`. Raises `InvalidValue`."""
        if not 0.0 <= checked("timeout_s", timeout_s, float) <= MAX_FLUSH_S:
            raise InvalidValue("timeout_s", f"timeout_s must be in [0, {MAX_FLUSH_S:g}], got {timeout_s!r}")
        return self.run(self.manager.flush_cache(timeout_s)).success

    def state(self, what: str = "state", **args: Any) -> dict[str, Any]:
        """The scheduler's "info", "state", "metrics" or "tree", or the "request" of a `rid`. Raises `InvalidValue`."""
        state = self.run(self.manager.get_state(checked("what", what, str), **args))
        if "error" in state:
            raise InvalidValue("what", str(state["error"]))
        return state

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`, run on the front's event loop: for code that drives `manager` itself. Raises `Unavailable` when closed."""
        return self._loop.run(work)

    # -- life -------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Aborts what runs and ends the threads. Idempotent."""
        if self.closed:
            return
        self.run(self._runtime.__aexit__(None, None, None))
        self.closed = True
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _load(config: RuntimeConfig) -> tuple[LoadedExecutor, FrontModel]:
    fake = env.fake_executor()
    path: Path | None = None
    if fake is None:
        from rootlet.engine.model_source import resolve_model

        path = resolve_model(config.model.model)
    return load_executor(config, path, fake=fake), load_front(config, path, fake=fake)


def _requests(
    engine: Engine,
    prompt: Prompt,
    sampling: Sampling,
    logprobs: Logprobs,
    *,
    stream: bool,
    request: Mapping[str, Any],
    max_tokens: int | None = DEFAULT_MAX_TOKENS,
    param: str = "prompt",
) -> tuple[list[GenerateReq], bool]:
    """(one request a prompt, did the caller give a list of prompts?) `max_tokens`: for a `sampling` that does not mention it, None = no limit."""
    defaults = engine.manager.sampling_defaults if engine.config.server.sampling_defaults == "model" else {}
    if sampling is None or (isinstance(sampling, Mapping) and not {"max_tokens", "max_new_tokens"} & set(sampling)):
        sampling = {**(sampling or {}), "max_new_tokens": max_tokens}
    return requests_of(prompt, sampling_of(sampling, defaults), logprobs, stream=stream, request=request, param=param)


def _stream(engine: Engine, req: GenerateReq) -> Iterator[GenerateChunk]:
    chunks = engine.manager.generate(req)
    try:
        while (chunk := engine.run(_next(chunks))) is not None:
            yield chunk
    finally:
        if not engine.closed:
            engine.run(_close(chunks))


async def _all(manager: TokenizerManager, reqs: list[GenerateReq]) -> list[list[GenerateResult]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_collect(manager, req)) for req in reqs]
    return [task.result() for task in tasks]


async def _collect(manager: TokenizerManager, req: GenerateReq) -> list[GenerateResult]:
    return results_of([chunk async for chunk in manager.generate(req)])


async def _next(chunks: AsyncIterator[GenerateChunk]) -> GenerateChunk | None:
    return await anext(chunks, None)


async def _close(chunks: Any) -> None:
    await chunks.aclose()


def _shape(results: list[list[GenerateResult]], many: bool, n: int) -> Results:
    if n == 1:
        flat = [choices[0] for choices in results]
        return flat if many else flat[0]
    return results if many else results[0]
