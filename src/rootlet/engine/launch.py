"""`launch(config)`: the whole server, from an empty port to an exit code.

    port taken -> HTTP up (status loading) -> scheduler process -> tokenizer -> ready -> ... -> drained | dead -> HTTP closed -> children gone

Exit codes: 0 drained or told to stop, 1 the engine died, 2 the user's configuration or model file. SIGTERM or SIGINT drains (new requests get 503
shutting_down, running ones finish for at most --drain-timeout seconds); a second one aborts at once; while loading it ends at once.
A child's death ends every open request within two seconds (503 engine_dead) and then the server; restarting is the orchestrator's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pkgutil
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from starlette.types import ASGIApp

from rootlet.config.resolve import num_usable_cores, resolve_config
from rootlet.config.schema import RuntimeConfig
from rootlet.core import env, log
from rootlet.core.clock import Clock, SystemClock
from rootlet.core.errors import RootletError
from rootlet.engine.http import HttpServer
from rootlet.engine.launch_events import LaunchEvent, print_event
from rootlet.engine.listen import listen, raise_file_limit, url_of
from rootlet.engine.model_side import FrontModel, load_front
from rootlet.engine.private_dir import private_dir
from rootlet.engine.processes import DETOKENIZER, ENGINE_ERROR, MAIN, SCHEDULER, USER_ERROR, LaunchSpec, write_spec
from rootlet.engine.supervisor import STUCK_AFTER_S, Supervisor, Watchdog, describe_death, lower_own_priority
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.ipc.channel import AsyncReceiver
from rootlet.ipc.channel_zmq import ZmqAsyncReceiver, ZmqSender, address
from rootlet.ipc.codec import ToMain, main_codec, scheduler_codec
from rootlet.ipc.messages import HealthTick, LoadProgress, SchedulerError, SchedulerReady, ShutdownReq

AppFactory = Callable[[TokenizerManager, RuntimeConfig], ASGIApp]

DEFAULT_APP = "rootlet.server.app:build_app"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCH_EVERY_S = 0.1
LAST_WORDS_S = 0.3  # a child that ends on its own says why first; the message may still be on its way
DRAIN_MARGIN_S = 5.0
HURRY_S = 2.0
FLUSH_S = 1.0

_log = log.logger("launch")


def launch(
    config: RuntimeConfig,
    *,
    on_event: Callable[[LaunchEvent], None] = print_event,
    stuck_after_s: float = STUCK_AFTER_S,
    app: str | AppFactory = DEFAULT_APP,
) -> int:
    """Serve until told to stop; returns the exit code. Must run in the main thread (signals, PDEATHSIG).

    `app` makes the ASGI application, or names what does ("module:attribute"): the engine knows no dialect.
    """
    log.configure(config.server.log_level, process=MAIN)
    # A signal that comes before the loop can answer it waits; it must neither be lost nor kill the process with its directory left behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return _launch(config, on_event, stuck_after_s, pkgutil.resolve_name(app) if isinstance(app, str) else app)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _launch(config: RuntimeConfig, on_event: Callable[[LaunchEvent], None], stuck_after_s: float, app: AppFactory) -> int:
    raise_file_limit()
    try:
        config, reasons = resolve_config(config, num_cores=num_usable_cores())
        runtime_dir = env.runtime_dir()
        sock = listen(config.server.host, config.server.port)
    except RootletError as error:
        on_event(LaunchEvent("failed", message=error.message))
        return USER_ERROR
    for name, reason in reasons.items():
        _log.info("resolved", field=name, reason=reason)
    url = url_of(sock, config.server.host)
    on_event(LaunchEvent("listening", url=url))
    with private_dir(runtime_dir) as directory, contextlib.closing(sock):
        server = _Server(config, directory, url=url, on_event=on_event, stuck_after_s=stuck_after_s)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(server.run(sock, app))
    on_event(LaunchEvent("stopped", message="stopped" if code == 0 else f"stopped with exit code {code}"))
    return code


class _Server:
    """One run of the server. `_ended` holds (exit code, seconds that open replies may still take)."""

    def __init__(self, config: RuntimeConfig, directory: Path, *, url: str, on_event: Callable[[LaunchEvent], None], stuck_after_s: float) -> None:
        self._config = config
        self._directory = directory
        self._url = url
        self._on_event = on_event
        self._stuck_after_s = stuck_after_s
        self._clock = SystemClock()
        self._fake = env.fake_executor()
        self._supervisor = Supervisor()
        self._watchdogs: dict[str, Watchdog] = {}
        self._to_scheduler = ZmqSender(address(directory, SCHEDULER), scheduler_codec(), linger_s=0.0)
        self._manager = TokenizerManager(self._to_scheduler.send, config, clock=self._clock, liveness=self._liveness)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[tuple[int, float]]

    async def run(self, sock: socket.socket, app: AppFactory) -> int:
        """Serve on `sock` (bound, not yet accepting) until the first end; returns the exit code, with children and channels gone. One use."""
        loop = self._loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        inbox = ZmqAsyncReceiver(address(self._directory, MAIN), main_codec())
        http = HttpServer(app(self._manager, self._config), self._config.server)
        http_task = asyncio.create_task(http.run_on(sock))
        http_task.add_done_callback(lambda task: None if task.cancelled() else self._end(ENGINE_ERROR, 0.0))
        self._background(self._read(inbox))
        self._background(self._watch())
        threading.Thread(target=self._load, name="load", daemon=True).start()
        try:
            code, flush_s = await self._ended
            http.stop(flush_s)
            await http_task
        finally:
            for task in self._tasks:
                task.cancel()
            self._supervisor.kill_all()
            self._manager.close()
            inbox.close()
            self._to_scheduler.close()
        return code

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        """A background task that breaks would leave clients waiting for ever; so it ends the engine."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("background_task_failed", error=repr(error))
            self._fail(f"an internal task failed ({type(error).__name__})", ENGINE_ERROR)

    def _end(self, code: int, flush_s: float) -> None:
        if not self._ended.done():
            self._ended.set_result((code, flush_s))

    # -- loading ----------------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """In a daemon thread: it may take minutes, and the end of the process must not wait for it."""
        try:
            model_path = self._model_path()
            self._on_loop(lambda: self._start_children(model_path))
            front = load_front(self._config, model_path, fake=self._fake)
            self._on_loop(lambda: self._attach(front))
        except RootletError as error:
            message = error.message
            self._on_loop(lambda: self._fail(message, USER_ERROR))
        except Exception as error:
            _log.exception("load_failed")
            text = f"loading failed ({type(error).__name__}: {error})"
            self._on_loop(lambda: self._fail(text, ENGINE_ERROR))

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ended while this thread was still loading
            self._loop.call_soon_threadsafe(call)

    def _model_path(self) -> Path | None:
        if self._fake is not None:
            return None
        from rootlet.engine.model_source import resolve_model

        started_s = self._clock.now()

        def progress(phase: str, done: float) -> None:
            report = LoadProgress(phase, done, elapsed_s=self._clock.now() - started_s)
            self._on_loop(lambda: self._progress(report))

        return resolve_model(self._config.model.model, progress=progress)

    def _start_children(self, model_path: Path | None) -> None:
        if self._ended.done():
            return
        config = replace(self._config, server=replace(self._config.server, api_key=None))
        spec = LaunchSpec(config, str(model_path) if model_path else None, self._fake, env.check_enabled(), os.getpid())
        launch_file = write_spec(self._directory, spec)
        self._supervisor.start(SCHEDULER, launch_file)
        lower_own_priority()  # after the scheduler, before the detokenizer: children inherit it
        if config.server.detokenizer == "process":
            self._supervisor.start(DETOKENIZER, launch_file)

    def _attach(self, front: FrontModel) -> None:
        self._manager.attach_model(
            front.tokenizer, chat_template=front.chat_template, served_names=front.served_names, sampling_defaults=front.sampling_defaults
        )
        self._announce_ready()

    def _announce_ready(self) -> None:
        if self._manager.status == "ready":
            self._on_event(LaunchEvent("ready", url=self._url, ready=self._manager.ready_info, served_names=self._manager.served_names))

    def _progress(self, progress: LoadProgress) -> None:
        self._manager.handle(progress)
        self._on_event(LaunchEvent("progress", url=self._url, progress=progress))

    # -- running ----------------------------------------------------------------------------------------------------------------

    async def _read(self, inbox: AsyncReceiver[ToMain]) -> None:
        while True:
            for message in await inbox.recv():
                match message:
                    case LoadProgress():
                        self._progress(message)
                    case SchedulerError():
                        self._fail(message.message, message.exit_code)
                    case SchedulerReady():
                        self._watch_over(SCHEDULER)
                        self._manager.handle(message)
                        self._announce_ready()
                    case HealthTick():
                        if message.role == DETOKENIZER and DETOKENIZER not in self._watchdogs:
                            self._watch_over(DETOKENIZER)
                        if message.role in self._watchdogs:
                            self._watchdogs[message.role].tick()
                        self._manager.handle(message)
                    case _:
                        self._manager.handle(message)

    def _watch_over(self, role: str) -> None:
        """From its first sign of life on; before that it loads."""
        self._watchdogs[role] = Watchdog(self._clock, lambda: self._supervisor.cpu_s(role), role=role, stuck_after_s=self._stuck_after_s)

    async def _watch(self) -> None:
        """Ends with the first thing that ends the engine: a death that nobody asked for, or a standstill."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            death = self._supervisor.first_death()
            if death is not None and not (self._signals and death == (SCHEDULER, 0)):
                if death[1] > 0:
                    await asyncio.sleep(LAST_WORDS_S)
                self._fail(describe_death(*death), ENGINE_ERROR)
                return
            alive, why = self._liveness()
            if not alive:
                self._fail(why, ENGINE_ERROR)
                return

    def _liveness(self) -> tuple[bool, str]:
        reasons = [why for watchdog in self._watchdogs.values() if (why := watchdog.stuck()) is not None]
        return not reasons, "; ".join(reasons)

    def _fail(self, message: str, code: int) -> None:
        """The engine is lost: open requests hear of it now, then the process ends."""
        if self._ended.done():
            return
        _log.error("engine_failed", reason=message, exit_code=code)
        self._on_event(LaunchEvent("failed", url=self._url, message=message))
        self._manager.engine_failed(message)
        self._end(code, FLUSH_S)

    # -- ending -----------------------------------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        self._signals += 1
        if self._manager.status == "loading":
            self._end(0, 0.0)
        elif self._signals == 1:
            self._on_event(LaunchEvent("draining", url=self._url, message=draining_text(self._manager.num_open, self._config.server.drain_timeout)))
            self._manager.begin_drain()
            self._background(self._drain())
        else:
            self._hurry.set()

    async def _drain(self) -> None:
        """Running requests finish; ends when the scheduler has, when time is up, or at the second signal."""
        drain_s = self._config.server.drain_timeout
        self._to_scheduler.send(ShutdownReq(drain_s=drain_s))
        if not await self._scheduler_ends(drain_s + DRAIN_MARGIN_S):
            self._hurry.clear()
            self._to_scheduler.send(ShutdownReq(drain_s=0.0))
            await self._scheduler_ends(HURRY_S)
        await _until(self._clock, lambda: self._manager.num_open == 0, HURRY_S)  # last words pass through the detokenizer
        self._manager.abort_open("the server was shut down")
        self._end(0, FLUSH_S)

    async def _scheduler_ends(self, timeout_s: float) -> bool:
        await _until(self._clock, lambda: self._hurry.is_set() or self._supervisor.exit_code(SCHEDULER) is not None, timeout_s)
        return self._supervisor.exit_code(SCHEDULER) is not None


def draining_text(num_open: int, drain_s: float) -> str:
    if num_open == 0:
        return "draining: no request is open"
    return (
        f"draining {num_open} request{'s' if num_open > 1 else ''} for at most {drain_s:g} s; once more to abort {'them' if num_open > 1 else 'it'}"
    )


async def _until(clock: Clock, condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = clock.now() + timeout_s
    while not condition() and clock.now() < deadline_s:
        await asyncio.sleep(WATCH_EVERY_S / 5)
