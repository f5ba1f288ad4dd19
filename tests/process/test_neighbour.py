"""A busy process on a core of the kernel team: steps end all the same, and with the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.live_server import prompt, tiny_llama
from fixtures.step_driver import StepDriver
from rootlet.bench.neighbour import busy_neighbour, first_core
from rootlet.config.schema import CacheArgs, ComputeArgs, RuntimeConfig, SchedulerArgs
from rootlet.runner.local_executor import LocalExecutor

pytestmark = pytest.mark.process

STEPS = 40


def drawn(model: Path, threads: int) -> list[list[int]]:
    """Tokens of two rows, a team of `threads`."""
    config = RuntimeConfig(
        compute=ComputeArgs(threads=threads), cache=CacheArgs(max_total_tokens=1024), scheduler=SchedulerArgs(max_running=2, max_prefill=64)
    )
    executor = LocalExecutor(config, model)
    driver = StepDriver(executor)
    tokens = driver.generate([driver.add(prompt(20, 1)), driver.add(prompt(30, 2))], STEPS)
    executor.close()
    return tokens


def test_steps_end_beside_a_busy_process_and_give_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    alone = drawn(model, 1)
    with busy_neighbour(first_core()):
        beside = drawn(model, 2)
    assert beside == alone
