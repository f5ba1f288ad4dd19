"""Every "auto" of the control wing becomes a value, once, with the reason. What only the device knows (dtype, memory, kernels) is resolved there."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from rootlet.config.schema import RuntimeConfig, ServerArgs
from rootlet.core.errors import BadConfig

FEW_CORES = 2
SERVED_DEVICE = "cpu"
_ENDPOINT = re.compile(r"tcp://(?:[^\s:/]+|\[[^\s\]]+\]):(\d{1,5})|ipc://\S+")


def num_usable_cores() -> int:
    """Cores that this process may run on (affinity and containers considered)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def api_keys(server: ServerArgs) -> tuple[str, ...]:
    """The keys of `--api-key`, a comma between two. Raises `BadConfig` for a knob that is set and holds none: such a server would be open."""
    if server.api_key is None:
        return ()
    keys = tuple(dict.fromkeys(key.strip() for key in server.api_key.split(",") if key.strip()))
    if not keys:
        raise BadConfig("--api-key holds no key; leave it out for a server that asks for none")
    return keys


def resolve_config(config: RuntimeConfig, *, num_cores: int) -> tuple[RuntimeConfig, dict[str, str]]:
    """(config without the autos that the host decides, reason of each resolved field). Raises `BadConfig` for knobs that contradict."""
    _check_together(config)
    reasons: dict[str, str] = {}
    few = num_cores <= FEW_CORES
    cores = f"{num_cores} core{'s' if num_cores > 1 else ''}"
    scheduler, server, compute = config.scheduler, config.server, config.compute
    if compute.device == "auto":
        compute = dataclasses.replace(compute, device=SERVED_DEVICE)
        reasons["device"] = "the one device that this version serves"
    if scheduler.depth == "auto":
        scheduler = dataclasses.replace(scheduler, depth="1" if few else "2")
        reasons["depth"] = f"{cores}: " + ("the scheduler's thread is a kernel worker, one more would slow the team" if few else "plans overlap")
    if server.detokenizer == "auto":
        server = dataclasses.replace(server, detokenizer="inline" if few else "process")
        reasons["detokenizer"] = f"{cores}: " + ("one process less" if few else "text is made beside the event loop")
    return dataclasses.replace(config, scheduler=scheduler, compute=compute, server=server), reasons


def _check_together(config: RuntimeConfig) -> None:
    if config.compute.device not in ("auto", SERVED_DEVICE):
        raise BadConfig(f"--device {config.compute.device} is not there yet; use auto or {SERVED_DEVICE}")
    page, chunk = config.cache.page_size, config.scheduler.chunked_prefill
    if 0 < chunk < page:
        raise BadConfig(f"--chunked-prefill {chunk} is smaller than --page-size {page}: no chunk would fill a page")
    pool = config.cache.max_total_tokens
    if pool is not None and pool < page:
        better = f"give --max-total-tokens {page} or more, or a smaller --page-size"
        raise BadConfig(f"--max-total-tokens {pool} is smaller than --page-size {page}: the KV pool must hold at least one page; {better}")
    record = config.scheduler.record
    if record is not None and not Path(record).absolute().parent.is_dir():
        raise BadConfig(f"--record {record}: there is no folder {Path(record).absolute().parent}")
    _check_kv_events(config)
    api_keys(config.server)
    if page & (page - 1):
        raise BadConfig(f"--page-size must be a power of two, got {page}")
    if config.cache.mem != "auto":
        try:
            gib = float(config.cache.mem)
        except ValueError:
            raise BadConfig(f"--mem must be auto or a number of GiB, got {config.cache.mem!r}") from None
        if not 0 < gib < float("inf"):
            raise BadConfig(f"--mem must be above 0 GiB, got {config.cache.mem!r}")


def _check_kv_events(config: RuntimeConfig) -> None:
    events, replay = config.cache.kv_events, config.cache.kv_events_replay
    for knob, endpoint in (("--kv-events", events), ("--kv-events-replay", replay)):
        if endpoint is not None and not _is_endpoint(endpoint):
            raise BadConfig(f"{knob} must be an endpoint as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///path, got {endpoint!r}")
    if events is None and (replay is not None or config.cache.kv_events_topic):
        raise BadConfig("--kv-events-replay and --kv-events-topic need --kv-events")
    if events is not None and events == replay:
        raise BadConfig(f"--kv-events and --kv-events-replay cannot both be {events}")


def _is_endpoint(text: str) -> bool:
    """ZeroMQ itself would take a port of 99999, as another."""
    found = _ENDPOINT.fullmatch(text)
    return found is not None and int(found[1] or 1) < 2**16
