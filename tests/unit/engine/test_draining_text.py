"""What a terminal reads at the first Ctrl-C."""

from __future__ import annotations

import pytest

from rootlet.engine.launch import draining_text


@pytest.mark.parametrize(
    ("num_open", "text"),
    [
        (0, "draining: no request is open"),
        (1, "draining 1 request for at most 2.5 s; once more to abort it"),
        (2, "draining 2 requests for at most 2.5 s; once more to abort them"),
    ],
)
def test_numbers_are_said_right(num_open: int, text: str) -> None:
    assert draining_text(num_open, 2.5) == text
