"""Windows and states in a real server: whatever components a model has, its clients get the same tokens, and the server keeps nothing of them."""

from __future__ import annotations

import os

import pytest

from fixtures.live_server import Live, body, prompt
from rootlet.bench.server_process import running_server

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

FLAGS = ("--max-total-tokens", "1024", "--max-running", "4", "--chunked-prefill", "64", "--log-level", "warning")


def ids(length: int, seed: int, *, shared: int) -> list[int]:
    return [4 + i % 50 for i in [*prompt(shared, 99), *prompt(length - shared, seed)]]


def served(parts: str, depth: str) -> tuple[list[tuple[int, ...]], float]:
    """Tokens of requests that begin alike, once all together and once after each other; how many prompt tokens were cached."""
    environment = {**os.environ, "ROOTLET_TEST_EXECUTOR": f"hash_lm{parts}", "ROOTLET_CHECK": "1", "ROOTLET_TEST_RETRACT": "20"}
    with running_server(*FLAGS, "--depth", depth, env=environment) as server:
        live = Live(server)
        bodies = [body(ids(90 + 30 * i, i, shared=70), 30, temperature=0.8, sampling_seed=i) for i in range(8)]
        replies = [*live.ask(*bodies), *live.one_by_one(*bodies)]
        live.assert_exact()
        cached_len = float(live.state()["counters"]["cached_tokens"])
        live.assert_flushes()
    return [tuple(reply.one.ids) for reply in replies], cached_len


@pytest.mark.parametrize("depth", ["1", "2"])
def test_the_components_of_a_model_are_invisible(depth: str) -> None:
    plain, cached_len = served("", depth)
    assert cached_len > 0
    for parts in ("+swa", "+mamba", "+swa+mamba"):
        tokens, cached_len = served(parts, depth)
        assert tokens == plain, parts
        assert cached_len > 0, parts
