"""Builds the compute wing of one process: kernels -> weights -> KV pool -> attention, sampler -> graph -> warm-up. Each choice leaves a reason.

Runs once, at start. What it returns is driven by an executor (`local_executor.py`); sizes are decided in `capacity.py`.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rootlet.attention.base import find_backend
from rootlet.config.model import ModelConfig
from rootlet.config.model_load import load_model_config
from rootlet.config.resolve import num_usable_cores
from rootlet.config.schema import RuntimeConfig
from rootlet.core.log import logger
from rootlet.core.step import Capacity
from rootlet.formats.weights import open_weights
from rootlet.ipc.messages import LoadProgress
from rootlet.kernels import dispatch, ops
from rootlet.kernels.dispatch import KernelChoice
from rootlet.kv.mha import MHATokenToKVPool, kv_bytes_per_token
from rootlet.kv.pool import TokenToKVPool
from rootlet.loader.weight_source import FileWeights
from rootlet.models.causal_lm import CausalLM
from rootlet.models.registry import build_model
from rootlet.runner.capacity import MemorySum, available_bytes, check_position_tables, context_len, plan_memory
from rootlet.runner.model_runner import ModelRunner
from rootlet.runner.warmup import warm_up
from rootlet.sampling.sampler import Sampler

_log = logger("runner")

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes

Progress = Callable[[LoadProgress], None]
KV_DTYPES = {"float16": torch.float16, "float32": torch.float32, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Worker:
    """`info`: model facts and choices, plain values. `memory_sum`: the KV sum, lines for people."""

    runner: ModelRunner
    pool: TokenToKVPool
    info: dict[str, Any]
    memory_sum: tuple[str, ...]

    @property
    def capacity(self) -> Capacity:
        return self.runner.capacity


class _Reporter:
    """Sends phases with the seconds since the start. `phases`: what each took, and the process's peak memory at its end; the first, "imports", is all
    that came before."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._start = time.monotonic()
        self._phase, self._phase_start = "imports", self._start - (time.time() - psutil.Process().create_time())
        self.phases: dict[str, dict[str, float]] = {}

    def __call__(self, phase: str, done: float, detail: str = "") -> None:
        if phase != self._phase:
            now = time.monotonic()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
            self.phases[self._phase] = {"seconds": round(now - self._phase_start, 3), "peak_mib": round(peak / 2**20, 1)}
            self._phase, self._phase_start = phase, now
        if self._progress is not None:
            self._progress(LoadProgress(phase, done, detail, self.elapsed_s))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start


def _default_threads(choice: KernelChoice) -> int:
    """One a core; half of them for the reference, whose team spins at each of a step's hundreds of small operations: with a busy neighbour on two
    cores, a step on two threads took twenty times as long as on one."""
    return num_usable_cores() if choice.native else max(1, num_usable_cores() // 2)


def _load_model(
    config: RuntimeConfig, model_config: ModelConfig, path: Path, *, choice: KernelChoice, report: _Reporter
) -> tuple[CausalLM, FileWeights]:
    file = open_weights(path)
    source = FileWeights(file, choice.table, label=path.name, dtype=config.model.dtype, progress=lambda done, name: report("weights", done, name))
    model = build_model(model_config, source, max_len=context_len(config, model_config))
    source.finish()
    file.close()
    for note in source.notes:
        _log.info("weights_converted", what=note)
    return model, source


def _kv_dtype(config: RuntimeConfig, source: FileWeights) -> torch.dtype:
    wanted = config.model.kv_dtype
    if wanted == "auto":
        wanted = "float32" if set(source.kinds) <= {"f32"} else "float16"
    return KV_DTYPES[wanted]


def _make_runner(
    model: CausalLM, memory: MemorySum, *, choice: KernelChoice, kv_dtype: torch.dtype, graph: bool
) -> tuple[ModelRunner, TokenToKVPool]:
    capacity = memory.capacity
    backend = find_backend(choice.attention)
    pool = MHATokenToKVPool(model.config, num_pages=capacity.num_pages, page_size=capacity.page_size, dtype=kv_dtype, layout=backend.layout)
    sampler = Sampler(max_rows=capacity.max_rows, vocab_size=capacity.vocab_size, max_logit_rows=capacity.max_rows, native=choice.native)
    attention = backend(pool, capacity, model.config.num_kv_heads)
    runner = ModelRunner(model, attention, sampler, capacity=capacity, native=choice.native)
    if graph and choice.new_graph is not None:
        runner.capture(choice.new_graph())
    return runner, pool


def build_worker(config: RuntimeConfig, path: Path, *, progress: Progress | None = None) -> Worker:
    """Loads the model at `path`. Raises `BadModelFile` and `BadConfig`."""
    report = _Reporter(progress)
    report("open", 0.0, path.name)
    model_config = load_model_config(path)
    choice = dispatch.choose(config.compute.kernels, page_size=config.cache.page_size)
    _log.info("kernels", table=choice.table.name, reason=choice.reason)
    threads = config.compute.threads or _default_threads(choice)
    choice.set_threads(threads)
    ops.bind(choice.table)
    available = available_bytes()
    check_position_tables(context_len(config, model_config), model_config, available=available)
    model, source = _load_model(config, model_config, path, choice=choice, report=report)
    kv_dtype = _kv_dtype(config, source)
    memory = plan_memory(config, model_config, available=available, weights=source.num_bytes, token_bytes=kv_bytes_per_token(model_config, kv_dtype))
    graph = config.compute.graph and choice.new_graph is not None
    report("graph", 0.0, "recording a step" if graph else "no graph")
    runner, pool = _make_runner(model, memory, choice=choice, kv_dtype=kv_dtype, graph=graph)
    report("warmup", 0.0)
    decode_s = warm_up(runner)
    report("ready", 1.0)
    _log.info("loaded", **{name: f"{took['seconds']:.2f}s,{took['peak_mib']:.0f}MiB" for name, took in report.phases.items()})
    info = {
        "model": model_config.name,
        "arch": model_config.arch,
        "family": model_config.family,
        "quant": model_config.quant,
        "num_layers": model_config.num_layers,
        "hidden_size": model_config.hidden_size,
        "num_heads": model_config.num_heads,
        "num_kv_heads": model_config.num_kv_heads,
        "head_dim": model_config.head_dim,
        "vocab_size": model_config.vocab_size,
        "context_len": memory.capacity.max_context_len,
        "weights": dict(source.kinds),
        "weights_bytes": source.num_bytes,
        "converted": list(source.notes),
        "compute_dtype": "float32",
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "kv_bytes": memory.kv_bytes,
        "kernels": choice.table.name,
        "kernels_reason": choice.reason,
        "attention": choice.attention,
        "graph": graph,
        "threads": threads,
        "load_s": round(report.elapsed_s, 3),
        "load_phases": report.phases,
        "warmup_decode_s": round(decode_s, 5),
    }
    return Worker(runner, pool, info, memory.lines)
