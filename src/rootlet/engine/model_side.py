"""The two halves of a model: what the front needs (`FrontModel`) and what the scheduler drives (`LoadedExecutor`). Each process loads its own half.

The one place that chooses between a real model and the fake one, so that everything behind it is the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rootlet.config.schema import RuntimeConfig
from rootlet.core.clock import Clock, SystemClock
from rootlet.core.env import forced_retraction
from rootlet.core.errors import BadModelFile
from rootlet.core.log import logger
from rootlet.core.step import Executor
from rootlet.engine.hash_model import EOS_ID, HashTemplate, HashTokenizer, hash_executor
from rootlet.ipc.messages import LoadProgress, SchedulerReady
from rootlet.scheduler import record
from rootlet.scheduler.scheduler import Scheduler, Sinks

_log = logger("model")


@dataclass(frozen=True, slots=True)
class FrontModel:
    """Text side. `served_names[0]` is the reported one."""

    tokenizer: Any
    chat_template: Any
    served_names: tuple[str, ...]
    sampling_defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """Compute side, with what `SchedulerReady` tells people about it."""

    executor: Executor
    eos_token_ids: tuple[int, ...]
    memory_sum: tuple[str, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)


def served_names(config: RuntimeConfig, model_path: Path | None) -> tuple[str, ...]:
    """The names of --served-model-name, else what the user called the model, else the file's name."""
    given = config.model.served_model_name
    if given:
        names = tuple(name.strip() for name in given.split(",") if name.strip())
        if names:
            return names
    if config.model.model and not Path(config.model.model).exists():
        return (config.model.model,)
    if model_path is None:
        return ("hash_lm",)
    return (model_path.stem if model_path.is_file() else model_path.resolve().name,)


def load_front(config: RuntimeConfig, model_path: Path | None, *, fake: str | None = None) -> FrontModel:
    """Tokenizer, template, names, sampling defaults. Raises `BadModelFile`, `BadConfig`."""
    names = served_names(config, model_path)
    if fake is not None:
        return FrontModel(HashTokenizer(), HashTemplate(), names)
    assert model_path is not None
    from rootlet.formats.weights import require_model
    from rootlet.frontend.chat_template import load_chat_template
    from rootlet.frontend.tokenizer import load_tokenizer

    require_model(model_path)
    override = Path(config.model.chat_template) if config.model.chat_template else None
    return FrontModel(load_tokenizer(model_path), load_chat_template(model_path, override), names, sampling_defaults(model_path))


def sampling_defaults(model_path: Path) -> dict[str, Any]:
    """What the model's makers recommend (generation_config.json, or keys of the GGUF file); {} for a broken file: it is advice only."""
    from rootlet.config.model_load import load_sampling_defaults

    try:
        return load_sampling_defaults(model_path)
    except BadModelFile as error:
        _log.warning("no_sampling_defaults", reason=error.message)
        return {}


def load_executor(
    config: RuntimeConfig, model_path: Path | None, *, fake: str | None = None, progress: Callable[[LoadProgress], None] | None = None
) -> LoadedExecutor:
    """The executor of this machine. Slow: reads the weights. Raises `BadModelFile`, `BadConfig`."""
    if fake is not None:
        return LoadedExecutor(hash_executor(config, fake), (EOS_ID,), info={"model": "hash_lm"})
    assert model_path is not None
    from rootlet.config.model_load import load_model_config
    from rootlet.runner.local_executor import LocalExecutor

    eos = load_model_config(model_path).eos_token_ids
    local = LocalExecutor(config, model_path, progress=progress, threaded=config.scheduler.depth != "1")
    return LoadedExecutor(local, tuple(eos), tuple(local.memory_sum), dict(local.info))


def build_scheduler(
    config: RuntimeConfig,
    loaded: LoadedExecutor,
    *,
    sinks: Sinks,
    clock: Clock | None = None,
    check: bool = False,
) -> Scheduler:
    """The control wing over a loaded executor, recorded when `--record` says so. The caller owns both and drives the scheduler from one thread, by
    `record.run`. Raises `BadConfig`."""
    if sinks.request_log is None and config.server.log_requests:
        sinks = replace(sinks, request_log=log_request)
    executor, clock, retract_every = loaded.executor, clock or SystemClock(), forced_retraction()
    if config.scheduler.record is not None:
        logs = sinks.request_log is not None
        head = record.head_of(executor, config.scheduler, config.cache, eos_token_ids=loaded.eos_token_ids, logs=logs, retract_every=retract_every)
        recorder = record.Recorder(Path(config.scheduler.record), head)
        executor, clock = record.RecordingExecutor(executor, recorder), record.RecordingClock(clock, recorder)
    return Scheduler(
        executor=executor,
        scheduler_args=config.scheduler,
        cache_args=config.cache,
        eos_token_ids=loaded.eos_token_ids,
        clock=clock,
        sinks=sinks,
        check=check,
        retract_every=retract_every,
    )


def log_request(entry: dict[str, Any]) -> None:
    """The line of a finished request: where its time went, what it hit and why. Fields that say nothing are left out."""
    said = {name: value for name, value in entry.items() if value not in (None, "", {}, 200)}
    _log.info("request", **said)


def ready_message(scheduler: Scheduler, loaded: LoadedExecutor) -> SchedulerReady:
    """The scheduler's own capacity, and the executor's account of its memory."""
    ready = scheduler.ready_message()
    return msgspec.structs.replace(ready, memory_sum=ready.memory_sum or loaded.memory_sum, info={**loaded.info, **ready.info})
