"""Mains of the child processes: `python -m rootlet.engine.processes scheduler|detokenizer LAUNCH_FILE`.

The launch file lies in the private directory; nothing secret is on the command line. A child says why it ends (`SchedulerError`) before it does,
and ends with its parent, always. No fork: each child is a fresh interpreter.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from rootlet.config.schema import RuntimeConfig
from rootlet.core import log
from rootlet.core.clock import SystemClock
from rootlet.core.errors import BadConfig, BadModelFile
from rootlet.engine.lifeline import die_with_parent
from rootlet.ipc.channel_zmq import ZmqReceiver, ZmqSender, address
from rootlet.ipc.codec import ToMain, detokenizer_codec, main_codec, scheduler_codec
from rootlet.ipc.messages import HEALTH_PERIOD_S, HealthTick, SchedulerError

MAIN, SCHEDULER, DETOKENIZER = "main", "scheduler", "detokenizer"
LAUNCH_FILE = "launch.json"
USER_ERROR, ENGINE_ERROR = 2, 1

_log = log.logger("process")


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a child must know. `config` is resolved and holds no API key; `fake` names a test executor; `check` = costly invariants."""

    config: RuntimeConfig
    model_path: str | None
    fake: str | None
    check: bool
    parent_pid: int

    def path(self) -> Path | None:
        return Path(self.model_path) if self.model_path is not None else None


def write_spec(directory: Path, spec: LaunchSpec) -> Path:
    path = directory / LAUNCH_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(spec))
    return path


def read_spec(path: Path) -> LaunchSpec:
    return msgspec.json.decode(path.read_bytes(), type=LaunchSpec)


def guard_scheduler(work: Callable[[], None], send: Callable[[SchedulerError], None]) -> int:
    """Run the main of a scheduler, in a process or a thread: whatever escapes from it is told to the front before it ends. Returns the exit code."""
    try:
        work()
        return 0
    except (BadModelFile, BadConfig) as error:
        send(SchedulerError(error.message, exit_code=USER_ERROR))
        return USER_ERROR
    except Exception as error:
        _log.exception("scheduler_failed")
        send(SchedulerError(f"the scheduler failed ({type(error).__name__}); its log has the details", exit_code=ENGINE_ERROR))
        return ENGINE_ERROR


def run_scheduler(spec: LaunchSpec, directory: Path) -> int:
    """Main of the scheduler's process; returns its exit code."""
    inbox = ZmqReceiver(address(directory, SCHEDULER), scheduler_codec())
    to_main: ZmqSender[ToMain] = ZmqSender(address(directory, MAIN), main_codec())
    own_detokenizer = spec.config.server.detokenizer == "process"
    to_text = ZmqSender(address(directory, DETOKENIZER), detokenizer_codec()) if own_detokenizer else to_main
    try:
        return guard_scheduler(lambda: _serve_scheduler(spec, inbox, to_main, to_text), to_main.send)
    finally:
        for channel in (inbox, to_main, to_text):
            channel.close()
        zmq.Context.instance().term()  # waits until the last messages are out


def _serve_scheduler(spec: LaunchSpec, inbox: ZmqReceiver, to_main: ZmqSender[ToMain], to_text: ZmqSender) -> None:  # type: ignore[type-arg]
    from rootlet.engine.kv_events import kv_event_sink
    from rootlet.engine.model_side import build_scheduler, load_executor, ready_message
    from rootlet.scheduler import record
    from rootlet.scheduler.scheduler import Sinks

    with kv_event_sink(spec.config.cache) as events:
        loaded = load_executor(spec.config, spec.path(), fake=spec.fake, progress=to_main.send)
        try:
            sinks = Sinks(to_text.send, to_main.send, kv_events=events)
            scheduler = build_scheduler(spec.config, loaded, sinks=sinks, check=spec.check)
            to_main.send(ready_message(scheduler, loaded))
            record.run(scheduler, inbox.recv, int(spec.config.scheduler.depth))
        finally:
            loaded.executor.close()


def run_detokenizer(spec: LaunchSpec, directory: Path) -> int:
    """Main of the detokenizer's process: text for every batch, and signs of life, until the parent ends it."""
    from rootlet.engine.model_side import load_front
    from rootlet.frontend.detokenizer_manager import DetokenizerManager

    inbox = ZmqReceiver(address(directory, DETOKENIZER), detokenizer_codec())
    to_main: ZmqSender[ToMain] = ZmqSender(address(directory, MAIN), main_codec())
    manager = DetokenizerManager(load_front(spec.config, spec.path(), fake=spec.fake).tokenizer)
    clock, steps, told_s = SystemClock(), 0, -HEALTH_PERIOD_S
    while True:
        if clock.now() - told_s >= HEALTH_PERIOD_S:
            told_s = clock.now()
            to_main.send(HealthTick(steps, DETOKENIZER))
        for batch in inbox.recv(HEALTH_PERIOD_S):
            texts = manager.handle(batch)
            steps += 1
            if texts is not None:
                to_main.send(texts)


ROLES = {SCHEDULER: run_scheduler, DETOKENIZER: run_detokenizer}


def main(arguments: list[str]) -> int:
    role, path = arguments[0], Path(arguments[1])
    spec = read_spec(path)
    die_with_parent(spec.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer
    log.configure(spec.config.server.log_level, process=role)
    _log.debug("started", role=role, pid=os.getpid())
    return ROLES[role](spec, path.parent)


def end_process(code: int) -> NoReturn:
    """Ends at once: everything is closed, and taking the interpreter down module by module would keep a server's end waiting for a second."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
