"""One `RuntimeConfig` from three places, and where each value came from: flag > environment (`ROOTLET_<FIELD>`) > TOML file > default.

Field metadata (`schema.knob`) is the only source of names, types, ranges and choices. An unknown name is an error with a suggestion; a bad value
names the place, the value, and what would be right. Does not resolve "auto" (see `resolve`).
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootlet.config.schema import RuntimeConfig
from rootlet.core.env import NOT_KNOBS, PREFIX
from rootlet.core.errors import BadConfig
from rootlet.core.registry import did_you_mean

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Container platforms put variables of this form into every process when a service happens to be called like us.
_PLATFORM_NOISE = re.compile(r"ROOTLET_(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP).*)")


@dataclass(frozen=True, slots=True)
class Knob:
    """One field of one section, as its dataclass and its metadata say. `type` without None; `optional` = None is allowed."""

    section: str
    name: str
    type: type
    optional: bool
    low: float | None
    high: float | None
    choices: tuple[str, ...] | None
    default: Any
    help: str
    unit: str

    def read(self, raw: Any, where: str) -> Any:
        """The typed value. Raises `BadConfig` naming `where` it was set."""
        if raw is None or (self.optional and isinstance(raw, str) and raw.strip().lower() == "none"):
            if self.optional:
                return None
            raise BadConfig(f"{where}: {self.name} must have a value")
        value = self._typed(raw, where)
        if self.choices is not None and value not in self.choices:
            hint = did_you_mean(str(value), self.choices)
            raise BadConfig(f"{where}: {self.name} must be one of {', '.join(self.choices)}, got {value!r}{hint}")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            raise BadConfig(f"{where}: {self.name} must be {self._range()}, got {value!r}")
        return value

    def _typed(self, raw: Any, where: str) -> Any:
        readers = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}
        value = readers[self.type](raw)
        if value is None:
            words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
            raise BadConfig(f"{where}: {self.name} must be {words[self.type]}, got {raw!r}")
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise BadConfig(f"{where}: {self.name} must be text in UTF-8, got {value!a}; a file or folder of such a name must be renamed")
        return value

    def _range(self) -> str:
        if self.high is None:
            return f"at least {self.low:g}"
        if self.low is None:
            return f"at most {self.high:g}"
        return f"in [{self.low:g}, {self.high:g}]"


def _as_bool(raw: Any) -> bool | None:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _as_int(raw: Any) -> int | None:
    if isinstance(raw, bool):
        return None
    try:
        return int(raw) if isinstance(raw, int | str) else int(raw) if isinstance(raw, float) and raw.is_integer() else None
    except ValueError:
        return None


def _as_float(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return None
    try:
        value = float(raw)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _as_str(raw: Any) -> str | None:
    if isinstance(raw, str | Path):
        return str(raw)
    return str(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else None


def knobs() -> dict[str, Knob]:
    """Every knob by field name, in the order of the schema; names are unique over all sections."""
    table: dict[str, Knob] = {}
    for section, args in typing.get_type_hints(RuntimeConfig).items():
        hints = typing.get_type_hints(args)
        for f in dataclasses.fields(args):
            plain = [t for t in typing.get_args(hints[f.name]) if t is not types.NoneType] or [hints[f.name]]
            optional = types.NoneType in typing.get_args(hints[f.name])
            assert f.name not in table, f"{f.name} exists in two sections"
            facts = {name: f.metadata[name] for name in ("low", "high", "choices", "help", "unit")}
            table[f.name] = Knob(section=section, name=f.name, type=plain[0], optional=optional, default=f.default, **facts)
    return table


def load_config(flags: Mapping[str, Any], env: Mapping[str, str], file: Path | None) -> tuple[RuntimeConfig, dict[str, str]]:
    """(config, source of each field: "default", "file PATH", "env NAME" or "flag --name"). `flags` by field name, dashes or underscores.

    Raises `BadConfig`: unknown name, wrong type, out of range, unreadable file.
    """
    table = knobs()
    values: dict[str, Any] = {}
    sources = dict.fromkeys(table, "default")
    found = [*_from_file(file, table), *_from_env(env, table), *_from_flags(flags, table)]
    for name, raw, source in found:
        values[name] = table[name].read(raw, source)
        sources[name] = source
    sections = {
        section: args(**{name: value for name, value in values.items() if table[name].section == section})
        for section, args in typing.get_type_hints(RuntimeConfig).items()
    }
    return RuntimeConfig(**sections), sources


def _from_flags(flags: Mapping[str, Any], table: Mapping[str, Knob]) -> Iterable[tuple[str, Any, str]]:
    for flag, raw in flags.items():
        name = flag.lstrip("-").replace("-", "_")
        shown = "--" + name.replace("_", "-")
        if name not in table:
            raise BadConfig(f"unknown option {shown}{did_you_mean(name, table, show=lambda n: '--' + n.replace('_', '-'))}")
        yield name, raw, f"flag {shown}"


def _from_env(env: Mapping[str, str], table: Mapping[str, Knob]) -> Iterable[tuple[str, Any, str]]:
    for variable in sorted(env):
        if not variable.startswith(PREFIX) or variable in NOT_KNOBS or _PLATFORM_NOISE.fullmatch(variable):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name == "port" and "://" in env[variable]:
            continue  # the same platforms: ROOTLET_PORT=tcp://10.0.0.1:80
        if name not in table:
            raise BadConfig(f"unknown environment variable {variable}{did_you_mean(name, table, show=lambda n: PREFIX + n.upper())}")
        yield name, env[variable], f"env {variable}"


def _from_file(file: Path | None, table: Mapping[str, Knob]) -> Iterable[tuple[str, Any, str]]:
    if file is None:
        return
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfig(f"cannot read the config file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"config file {file} is not valid TOML: {error}") from error
    sections = sorted({knob.section for knob in table.values()})
    for section, entries in document.items():
        if section not in sections or not isinstance(entries, dict):
            raise BadConfig(
                f"config file {file}: unknown table [{section}]{did_you_mean(section, sections, show=str)} (known: {', '.join(sections)})"
            )
        for name, raw in entries.items():
            if name not in table:
                raise BadConfig(f"config file {file}: unknown key {name!r} in [{section}]{did_you_mean(name, table, show=str)}")
            if table[name].section != section:
                raise BadConfig(f"config file {file}: {name!r} belongs in [{table[name].section}], not in [{section}]")
            yield name, raw, f"file {file}"
