"""`--record` over the whole runtime with the real clock: what was recorded replays without a difference."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rootlet.config.load import load_config
from rootlet.core.sampling_params import SamplingParams
from rootlet.engine.hash_model import EOS_ID, HashTemplate, HashTokenizer, hash_executor
from rootlet.engine.inproc import InprocRuntime
from rootlet.engine.model_side import FrontModel, LoadedExecutor
from rootlet.frontend.tokenizer_manager import TokenizerManager
from rootlet.frontend.types import GenerateReq
from rootlet.scheduler.replay import replay


@pytest.mark.parametrize("depth", ["1", "2"])
def test_a_recorded_runtime_replays_without_a_difference(tmp_path: Path, depth: str) -> None:
    path = tmp_path / "record"
    options = {"ctx_len": 256, "max_total_tokens": 512, "log_requests": depth == "2", "depth": depth, "chunked_prefill": 32, "record": str(path)}
    config = load_config(options, {}, None)[0]
    front = FrontModel(HashTokenizer(), HashTemplate(), ("hash",))

    async def ask(manager: TokenizerManager, number: int) -> int:
        sampling = SamplingParams(max_new_tokens=20 + number, seed=number, n=1 + number % 2)
        req = GenerateReq(prompt="shared beginning of all " * 3 + str(number), sampling=sampling, user=f"u{number % 3}")
        return sum([len(chunk.token_ids) async for chunk in manager.generate(req)])

    async def go() -> None:
        async with InprocRuntime(config, LoadedExecutor(hash_executor(config), (EOS_ID,)), front) as manager:
            assert all(await asyncio.gather(*(ask(manager, i) for i in range(12))))

    asyncio.run(go())
    outcome = replay(path)
    assert outcome.differing == []
    assert outcome.plans > 20
    assert outcome.messages >= 18
