"""`Engine`: the offline Python API. The whole runtime in this process, no HTTP, no signal handlers, no configuration from the environment.

    with rootlet.Engine("model.gguf", ctx_len=4096) as engine:
        print(engine.generate("The capital of France is", {"max_tokens": 8, "temperature": 0}).text)

The front runs on an event loop in a thread of its own, the scheduler in another; calls from any thread and from any event loop are fine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from rootlet.config.load import load_config
from rootlet.config.resolve import num_usable_cores, resolve_config
from rootlet.config.schema import RuntimeConfig
from rootlet.core import env
from rootlet.core.errors import RootletError, Unavailable
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import LogprobSpec
from rootlet.engine.inproc import InprocRuntime
from rootlet.engine.model_side import FrontModel, LoadedExecutor, load_executor, load_front
from rootlet.engine.results import GenerateResult, prompts_of, results_of, sampling_of
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.frontend.types import GenerateChunk, GenerateReq

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
Sampling = Mapping[str, Any] | SamplingParams | None
Logprobs = int | LogprobSpec | None
Results = GenerateResult | list[GenerateResult] | list[list[GenerateResult]]


class Engine:
    """`model` as for `rootlet serve` (None = the default model); keywords are the flags with underscores. Raises `BadConfig`, `BadModelFile`.

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
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rootlet-front", daemon=True)
        self._thread.start()
        self._manager: TokenizerManager = self._run(self._runtime.__aenter__())
        if self._manager.status != "ready":
            reason = self._manager.health()[1]
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

        `logprobs` = alternatives a token (0 = the chosen one only), or a `LogprobSpec`, which can ask for those of the prompt. `request`: other `GenerateReq` fields (rid, cache_salt, priority...).
        Raises `InvalidValue`, `ContextOverflow`, `PoolOverflow`, `QueueFull`, `RequestFailed`.
        """
        reqs, many = self._requests(prompt, sampling, logprobs, stream=stream, request=request)
        if stream:
            return self._stream(reqs[0])
        return _shape(self._run(self._all(reqs)), many, reqs[0].sampling.n)

    async def agenerate(self, prompt: Prompt, sampling: Sampling = None, *, logprobs: Logprobs = None, **request: Any) -> Results:
        """As `generate`, awaitable on any event loop. Cancelling it aborts the request."""
        reqs, many = self._requests(prompt, sampling, logprobs, stream=False, request=request)
        return _shape(await self._await(self._all(reqs)), many, reqs[0].sampling.n)

    async def astream(
        self, prompt: Prompt, sampling: Sampling = None, *, logprobs: Logprobs = None, **request: Any
    ) -> AsyncIterator[GenerateChunk]:
        """Chunks of one prompt, on any event loop. Leaving the loop aborts the request."""
        chunks = self._manager.generate(self._requests(prompt, sampling, logprobs, stream=True, request=request)[0][0])
        try:
            while (chunk := await self._await(_next(chunks))) is not None:
                yield chunk
        finally:
            await self._await(_close(chunks))

    @overload
    def chat(self, messages: Sequence[dict[str, Any]], sampling: Sampling = None, *, stream: Literal[False] = False, **template: Any) -> Results: ...
    @overload
    def chat(
        self, messages: Sequence[dict[str, Any]], sampling: Sampling = None, *, stream: Literal[True], **template: Any
    ) -> Iterator[GenerateChunk]: ...
    def chat(
        self, messages: Sequence[dict[str, Any]], sampling: Sampling = None, *, stream: bool = False, **template: Any
    ) -> Results | Iterator[GenerateChunk]:
        """The model's chat template over `messages`, then `generate`. `template`: tools, continue_final_message, template variables."""
        prompt = self._manager.chat_template.render(list(messages), **template)
        request = {"add_special_tokens": False, "param": "messages"}
        reqs, _ = self._requests(prompt, sampling, None, stream=stream, request=request)
        return self._stream(reqs[0]) if stream else _shape(self._run(self._all(reqs)), False, reqs[0].sampling.n)

    # -- text, cache, state -----------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._manager.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._manager.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def flush_cache(self, timeout_s: float = 10.0) -> bool:
        """Forget every cached prefix once nothing runs; False when that did not happen within `timeout_s`."""
        return self._run(self._manager.flush_cache(timeout_s)).success

    def state(self, what: str = "state", **args: Any) -> dict[str, Any]:
        """The scheduler's "info", "state" or "metrics"."""
        return self._run(self._manager.get_state(what, **args))

    @property
    def manager(self) -> TokenizerManager:
        return self._manager

    # -- life -------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Aborts what runs and ends the threads. Idempotent."""
        if self._closed:
            return
        self._run(self._runtime.__aexit__(None, None, None))
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _requests(
        self, prompt: Prompt, sampling: Sampling, logprobs: Logprobs, *, stream: bool, request: Mapping[str, Any]
    ) -> tuple[list[GenerateReq], bool]:
        prompts, many = prompts_of(prompt)
        defaults = self._manager.sampling_defaults if self.config.server.sampling_defaults == "model" else {}
        params = sampling_of(sampling, defaults)
        spec = LogprobSpec(top_n=logprobs) if isinstance(logprobs, int) else logprobs
        reqs = [
            GenerateReq(
                prompt=item if isinstance(item, str) else None,
                input_ids=None if isinstance(item, str) else item,
                sampling=params,
                logprobs=spec,
                stream=stream,
                **request,
            )
            for item in prompts
        ]
        return reqs, many

    async def _all(self, reqs: list[GenerateReq]) -> list[list[GenerateResult]]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_collect(self._manager, req)) for req in reqs]
        return [task.result() for task in tasks]

    def _stream(self, req: GenerateReq) -> Iterator[GenerateChunk]:
        chunks = self._manager.generate(req)
        try:
            while (chunk := self._run(_next(chunks))) is not None:
                yield chunk
        finally:
            if not self._closed:
                self._run(_close(chunks))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise Unavailable("the engine is closed", code="engine_dead")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


def _load(config: RuntimeConfig) -> tuple[LoadedExecutor, FrontModel]:
    fake = env.fake_executor()
    path: Path | None = None
    if fake is None:
        from rootlet.engine.model_source import resolve_model

        path = resolve_model(config.model.model)
    return load_executor(config, path, fake=fake), load_front(config, path, fake=fake)


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
