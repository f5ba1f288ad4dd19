"""A configuration file that is nested deeper than a parser goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootlet.config.load import load_config
from rootlet.core.errors import BadConfig


def test_a_file_nested_too_deep_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text("a=" + "[" * 100_000 + "]" * 100_000)
    with pytest.raises(BadConfig, match=r"deep\.toml is not valid TOML"):
        load_config({}, {}, file)
