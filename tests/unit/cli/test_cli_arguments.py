"""What a command line means, without running it."""

from __future__ import annotations

from rootlet.cli.main import app


def test_run_takes_a_dash_for_the_default_model() -> None:
    _, bound, _ = app.parse_args(["run", "-", "hi", "--max-tokens", "4"], exit_on_error=False, print_error=False)
    assert bound.arguments == {"model": "-", "prompt": "hi", "max_tokens": 4}
