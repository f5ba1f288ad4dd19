"""Everything in one process: the scheduler's loop in a thread, the front on the running event loop, in-process channels between them.

For tests, notebooks and `Engine`; any executor. The same objects as the server, so "in-process = over ZeroMQ" is a test, not a hope.
Installs no signal handlers and leaves nothing behind when it is closed.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from rootlet.config.schema import RuntimeConfig
from rootlet.core.clock import Clock
from rootlet.core.ids import IdSource
from rootlet.core.log import logger
from rootlet.engine.kv_events import kv_event_sink
from rootlet.engine.model_side import FrontModel, LoadedExecutor, build_scheduler, ready_message
from rootlet.engine.processes import guard_scheduler
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.ipc.channel_inproc import InprocAsyncChannel, InprocChannel
from rootlet.ipc.codec import ToMain
from rootlet.ipc.messages import ShutdownReq, ToScheduler
from rootlet.scheduler import record
from rootlet.scheduler.scheduler import Sinks

JOIN_S = 10.0

_log = logger("inproc")


class InprocRuntime:
    """Async context manager: `async with InprocRuntime(config, loaded, front) as manager`. One use. `config` is resolved (no "auto")."""

    def __init__(
        self,
        config: RuntimeConfig,
        loaded: LoadedExecutor,
        front: FrontModel,
        *,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        check: bool = False,
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._front = front
        self._clock = clock
        self._check = check
        self._to_scheduler: InprocChannel[ToScheduler] = InprocChannel()
        self._thread = threading.Thread(target=self._run_scheduler, name="rootlet-scheduler", daemon=True)
        self.manager = TokenizerManager(self._to_scheduler.send, config, clock=clock, ids=ids)

    async def __aenter__(self) -> TokenizerManager:
        self._to_main: InprocAsyncChannel[ToMain] = InprocAsyncChannel(asyncio.get_running_loop())
        front = self._front
        self.manager.attach_model(
            front.tokenizer, chat_template=front.chat_template, served_names=front.served_names, sampling_defaults=front.sampling_defaults
        )
        self._thread.start()
        for message in await self._to_main.recv():
            self.manager.handle(message)
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(self._reader_ended)
        return self.manager

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.manager.begin_drain()
        self._to_scheduler.send(ShutdownReq(drain_s=0.0))
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, JOIN_S)
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self.manager.engine_failed("the engine was closed")
        self.manager.close()
        self._to_main.close()
        self._loaded.executor.close()

    async def _read(self) -> None:
        while True:
            for message in await self._to_main.recv():
                self.manager.handle(message)

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """A reader that breaks would leave its callers waiting for ever; so it ends the engine."""
        error = None if reader.cancelled() else reader.exception()
        if error is not None:
            _log.error("front_failed", error=repr(error))
            self.manager.engine_failed(f"the front failed: {type(error).__name__}")

    def _run_scheduler(self) -> None:
        guard_scheduler(self._serve_scheduler, self._to_main.send)

    def _serve_scheduler(self) -> None:
        with kv_event_sink(self._config.cache) as events:
            sinks = Sinks(self._to_main.send, self._to_main.send, kv_events=events)
            scheduler = build_scheduler(self._config, self._loaded, sinks=sinks, clock=self._clock, check=self._check)
            self._to_main.send(ready_message(scheduler, self._loaded))
            record.run(scheduler, self._to_scheduler.recv, int(self._config.scheduler.depth))
