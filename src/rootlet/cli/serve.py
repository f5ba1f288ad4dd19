"""`rootlet serve`: flags, environment and file to a `RuntimeConfig`, then `engine.launch`."""

from __future__ import annotations

import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import cyclopts

from rootlet.cli.flags import given, with_knobs
from rootlet.config.load import load_config
from rootlet.config.resolve import num_usable_cores, resolve_config
from rootlet.config.schema import RuntimeConfig
from rootlet.core import env


def _explained(config: RuntimeConfig, sources: dict[str, str]) -> tuple[RuntimeConfig, dict[str, str]]:
    """(what would run, where each value came from). Raises `BadConfig` as serving would."""
    resolved, reasons = resolve_config(config, num_cores=num_usable_cores())
    shown = sources | {name: f"auto: {reason}" for name, reason in reasons.items()}
    if resolved.model.model is None:
        from rootlet.engine.model_source import DEFAULT_MODEL

        resolved = replace(resolved, model=replace(resolved.model, model=f"default model, {DEFAULT_MODEL.file_name}"))
    return resolved, shown


def _print_config(config: Any, sources: dict[str, str]) -> None:
    for section in fields(config):
        args = getattr(config, section.name)
        for item in fields(args):
            value = "***" if item.name == "api_key" and getattr(args, item.name) else getattr(args, item.name)
            print(f"{section.name + '.' + item.name:32} {value!s:24} {sources.get(item.name, 'default')}")


@with_knobs()
def serve(
    model: Annotated[str | None, cyclopts.Parameter(help="GGUF file, folder of safetensors, or Hub id [default: SmolLM2-135M-Instruct]")] = None,
    *,
    config: Annotated[Path | None, cyclopts.Parameter(help="TOML file with the same keys as the flags, a table per section")] = None,
    print_config: Annotated[
        bool, cyclopts.Parameter(help="print every value that would hold and where it came from, then exit", negative="")
    ] = False,
    **flags: Any,
) -> int:
    """Serve a model over HTTP.

    Every flag is also ROOTLET_FLAG_NAME in the environment and a key of --config (or of the file that ROOTLET_CONFIG names).
    Flags win, then environment, then file.
    """
    resolved, sources = load_config(given({"model": model, **flags}), env.environment(), config or env.config_file())
    if print_config:
        _print_config(*_explained(resolved, sources))
        return 0
    # A Ctrl-C while the server's modules are imported waits until `launch` can answer it as any other: "stopped", exit code 0.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from rootlet.cli.panel import StartupPanel
    from rootlet.engine.launch import launch

    with StartupPanel(key=resolved.server.api_key, host=resolved.server.host) as panel:
        return launch(resolved, on_event=panel.on_event)
