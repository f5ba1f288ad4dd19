"""`rootlet doctor`: what this machine is, what would be chosen on it, and the command to paste. Never changes anything."""

from __future__ import annotations

import json
import platform
import shutil
import socket
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import psutil

from rootlet.config.resolve import num_usable_cores
from rootlet.core.errors import RootletError


def _native() -> tuple[bool, str]:
    if find_spec("rootlet.kernels.cpu._native") is None:
        compiler = shutil.which("c++") or shutil.which("g++")
        cure = "run `make build`" if compiler else "install a C++ compiler first"
        return False, f"not built: the torch reference runs, many times slower; {cure}"
    native = import_module("rootlet.kernels.cpu._native")
    return True, f"built, instruction set {native.current_isa()}"


def _port(port: int) -> tuple[bool, str]:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError as error:
            return False, f"127.0.0.1:{port} cannot be used: {error.strerror} (choose another with --port)"
    return True, f"127.0.0.1:{port} is free"


def _model(model: str | None) -> tuple[bool, str]:
    from rootlet.config.model_load import load_model_config
    from rootlet.engine.model_source import DEFAULT_MODEL, cache_folder

    path = Path(model) if model else cache_folder() / DEFAULT_MODEL.file_name
    if not path.exists():
        return model is None, "the default model is not fetched yet: `rootlet serve` does it" if model is None else f"there is no {path}"
    try:
        config = load_model_config(path)
    except RootletError as error:
        return False, error.message
    size_mib = sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()) / 2**20
    kind = f"{config.family}, {config.num_layers} layers, {config.quant or config.dtype}"
    return True, f"{path.name}: {kind}, {size_mib:.0f} MiB, context {config.max_context_len}"


def examine(model: str | None, port: int) -> list[dict[str, Any]]:
    """The findings as {what, ok, text}, in the order printed."""
    memory = psutil.virtual_memory()
    cores = num_usable_cores()
    sizes = f"{cores} cores, {memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
    checks = {
        "machine": (True, f"{platform.system()} {platform.machine()}, {sizes}"),
        "python": (True, platform.python_version()),
        "native kernels": _native(),
        "load": (psutil.getloadavg()[0] < cores, f"{psutil.getloadavg()[0]:.1f} running on {cores} cores (a busy neighbour halves the speed)"),
        "port": _port(port),
        "model": _model(model),
    }
    return [{"what": what, "ok": ok, "text": text} for what, (ok, text) in checks.items()]


def doctor(
    model: Annotated[str | None, cyclopts.Parameter(help="a model to look at; none = the default model")] = None,
    *,
    port: Annotated[int, cyclopts.Parameter(help="port that the server would use")] = 30000,
    as_json: Annotated[bool, cyclopts.Parameter(name="--json", help="for programs", negative="")] = False,
) -> int:
    """Explain this machine; exit code 1 when something stands in the way."""
    found = examine(model, port)
    if as_json:
        print(json.dumps(found))
    else:
        for check in found:
            print(f"{'ok  ' if check['ok'] else 'LOOK'} {check['what']:15} {check['text']}")
        print(f"\nrootlet serve{' ' + model if model else ''}{'' if port == 30000 else f' --port {port}'}")
    return 0 if all(check["ok"] for check in found) else 1
