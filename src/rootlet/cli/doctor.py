"""`rootlet doctor`: what this machine is, what would be chosen on it, and the command to paste. Never changes anything.

A finding is ok, a `note` (it may slow things down and passes, as a busy machine does) or a `LOOK` (it stands in the way: exit code 1). What is
recommended is there: a command is only named when this machine has it, a model or a port only when it can be used.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import socket
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
import psutil

from rootlet.config.load import load_config
from rootlet.config.resolve import num_usable_cores
from rootlet.core.errors import RootletError

Level = Literal["ok", "note", "LOOK"]
SOURCE = Path(__file__).resolve().parents[3]
"""The folder of the source tree, when this is an editable installation of one."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    level: Level
    text: str


def this_command() -> str:
    """How this very installation is called here: `rootlet` where the shell finds it, else by its path, else through its interpreter."""
    script = Path(sys.executable).with_name("rootlet")
    found = shutil.which("rootlet")
    if found is not None and script.is_file() and Path(found).resolve() == script.resolve():
        return "rootlet"
    return shlex.quote(str(script)) if script.is_file() else f"{shlex.quote(sys.executable)} -m rootlet.cli.main"


def _native() -> Finding:
    if find_spec("rootlet.kernels.cpu._native") is None:
        return Finding("native kernels", "LOOK", f"not built: the torch reference runs, many times slower; {_cure()}")
    native = import_module("rootlet.kernels.cpu._native")
    return Finding("native kernels", "ok", f"built, instruction set {native.current_isa()}")


def _cure() -> str:
    if not (shutil.which("c++") or shutil.which("g++")):
        return "install a C++17 compiler, then Rootlet again from its source"
    if (SOURCE / "Makefile").is_file() and shutil.which("make") and Path(sys.prefix) == SOURCE / ".venv":
        return f"run `make -C {shlex.quote(str(SOURCE))} build`"
    return "install Rootlet again from its source"


def _load(cores: int) -> Finding:
    load = psutil.getloadavg()[0]
    return Finding("load", "ok" if load < cores else "note", f"{load:.1f} running on {cores} cores (a busy neighbour halves the speed)")


def _port(port: int) -> Finding:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OverflowError:
            return Finding("port", "LOOK", f"there is no port {port}: it must be in [0, 65535] (--port)")
        except OSError as error:
            return Finding("port", "LOOK", f"127.0.0.1:{port} cannot be used: {error.strerror} (choose another with --port; 0 = any free one)")
    return Finding("port", "ok", f"127.0.0.1:{port} is free" if port else "any free one")


def _model(model: str | None) -> Finding:
    from rootlet.config.model_load import load_model_config
    from rootlet.engine.model_source import DEFAULT_MODEL, cache_folder, may_be_model

    path = cache_folder() / DEFAULT_MODEL.file_name if model is None else Path(model).expanduser()
    if model == "" or not path.exists():
        if model is None:
            return Finding("model", "ok", "the default model is not fetched yet: serving it does that")
        if may_be_model(model):
            return Finding("model", "ok", f"{model} is not here; as the name of a Hub model it is fetched when it is served")
        return Finding("model", "LOOK", f"{model!r} is no file or folder here, and not the name of a Hub model (org/name)")
    try:
        load_config({"model": model}, {}, None)
        config = load_model_config(path)
    except RootletError as error:
        return Finding("model", "LOOK", error.message)
    size_mib = sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()) / 2**20
    kind = f"{config.family}, {config.num_layers} layers, {config.quant or config.dtype}"
    return Finding("model", "ok", f"{path.name}: {kind}, {size_mib:.0f} MiB, context {config.max_context_len}")


def examine(model: str | None, port: int) -> list[Finding]:
    """The findings, in the order printed."""
    memory = psutil.virtual_memory()
    cores = num_usable_cores()
    sizes = f"{cores} cores, {memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
    return [
        Finding("machine", "ok", f"{platform.system()} {platform.machine()}, {sizes}"),
        Finding("python", "ok", platform.python_version()),
        _native(),
        _load(cores),
        _port(port),
        _model(model),
    ]


def advice(found: list[Finding], model: str | None, port: int) -> str:
    """The command to paste, with a port that can be used; without a model that can be served there is none."""
    stuck = {finding.what for finding in found if finding.level == "LOOK"}
    if "model" in stuck:
        return "nothing to serve before the model is found; without a name the default model is served"
    asked = "" if port == 30000 else f" --port {port}"
    return f"{this_command()} serve{'' if model is None else ' ' + shlex.quote(model)}{' --port 0' if 'port' in stuck else asked}"


def doctor(
    model: Annotated[str | None, cyclopts.Parameter(help="a model to look at; none = the default model")] = None,
    *,
    port: Annotated[int, cyclopts.Parameter(help="port that the server would use")] = 30000,
    as_json: Annotated[bool, cyclopts.Parameter(name="--json", help="for programs", negative="")] = False,
) -> int:
    """Explain this machine; exit code 1 when something stands in the way (LOOK). A note is none: a busy machine serves too."""
    found = examine(model, port)
    if as_json:
        print(json.dumps([{"what": f.what, "ok": f.level != "LOOK", "level": f.level.lower(), "text": f.text} for f in found]))
    else:
        for finding in found:
            print(f"{finding.level:4} {finding.what:15} {finding.text}")
        print(f"\n{advice(found, model, port)}")
    return 1 if any(finding.level == "LOOK" for finding in found) else 0
