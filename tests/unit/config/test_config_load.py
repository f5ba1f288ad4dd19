"""Flags, environment and file become one config, with sources; nothing unknown or wrong gets through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rootlet.config.load import knobs, load_config
from rootlet.config.schema import RuntimeConfig
from rootlet.core.errors import BadConfig


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rootlet.toml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_default() -> None:
    config, sources = load_config({}, {}, None)
    assert config == RuntimeConfig()
    assert set(sources.values()) == {"default"}
    assert len(sources) == len(knobs()) <= 60


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "[server]\nport = 1\nhost = 'f'\nmax_n = 5\n[cache]\nprefix_cache = false\n")
    config, sources = load_config({"port": 3}, {"ROOTLET_PORT": "2", "ROOTLET_HOST": "e", "HOME": "/x"}, file)
    assert (config.server.port, config.server.host, config.server.max_n, config.cache.prefix_cache) == (3, "e", 5, False)
    assert (sources["port"], sources["host"], sources["max_n"]) == ("flag --port", "env ROOTLET_HOST", f"file {file}")
    assert sources["page_size"] == "default"


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("ctx_len", "2048", 2048),
        ("ctx-len", 64, 64),
        ("--ctx-len", None, None),
        ("ctx_len", "none", None),
        ("prefix_cache", "off", False),
        ("prefix_cache", "YES", True),
        ("queue_timeout", "1.5", 1.5),
        ("queue_timeout", 2, 2.0),
        ("mem", 2, "2"),
        ("mem", 1.5, "1.5"),
        ("depth", 2, "2"),
        ("model", Path("a/b"), "a/b"),
        ("max_running", 8.0, 8),
    ],
)
def test_values_are_typed(name: str, raw: Any, value: Any) -> None:
    config, _ = load_config({name: raw}, {}, None)
    field = name.lstrip("-").replace("-", "_")
    got = getattr(getattr(config, knobs()[field].section), field)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prot": 1}, ["--prot", "did you mean --port"]),
        ({"port": 70000}, ["--port", "[0, 65535]", "70000"]),
        ({"port": -1}, ["[0, 65535]", "-1"]),
        ({"port": "http"}, ["integer", "'http'"]),
        ({"port": True}, ["integer", "True"]),
        ({"port": None}, ["port must have a value"]),
        ({"max_running": 1.5}, ["integer", "1.5"]),
        ({"page_size": 256}, ["[1, 128]"]),
        ({"max_n": 0}, ["at least 1", "0"]),
        ({"evict": "lur"}, ["lru", "did you mean 'lru'"]),
        ({"depth": "3"}, ["auto, 1, 2"]),
        ({"prefix_cache": "maybe"}, ["true or false", "'maybe'"]),
        ({"drain_timeout": "nan"}, ["number", "'nan'"]),
        ({"drain_timeout": "inf"}, ["number"]),
        ({"model": "m\udcff.gguf"}, ["--model", "UTF-8", "'m\\udcff.gguf'", "renamed"]),
        ({"served_model_name": "a,\ud800"}, ["--served-model-name", "UTF-8"]),
    ],
)
def test_bad_flags_are_named(flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadConfig) as caught:
        load_config(flags, {}, None)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"ROOTLET_PROT": "1"}, ["ROOTLET_PROT", "did you mean ROOTLET_PORT"]),
        ({"ROOTLET_PORT": "x"}, ["ROOTLET_PORT", "'x'"]),
    ],
)
def test_bad_environment_is_named(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(BadConfig) as caught:
        load_config({}, env, None)
    assert all(word in str(caught.value) for word in words)


def test_variables_that_platforms_inject_are_no_config() -> None:
    env = {
        "ROOTLET_PORT": "tcp://10.0.0.1:80",
        "ROOTLET_SERVICE_HOST": "10.0.0.1",
        "ROOTLET_SERVICE_PORT": "80",
        "ROOTLET_PORT_80_TCP_ADDR": "10.0.0.1",
        "ROOTLET_CHECK": "1",
    }
    assert load_config({}, env, None)[0] == RuntimeConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sever]\nport = 1\n", ["[sever]", "did you mean server"]),
        ("port = 1\n", ["[port]", "known:"]),
        ("[server]\nprot = 1\n", ["'prot'", "did you mean port"]),
        ("[cache]\nport = 1\n", ["belongs in [server]"]),
        ("[server]\nport = 'x'\n", ["integer", "rootlet.toml"]),
        ("[server\n", ["not valid TOML"]),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(BadConfig) as caught:
        load_config({}, {}, _file(tmp_path, text))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="cannot read the config file"):
        load_config({}, {}, tmp_path / "none.toml")
