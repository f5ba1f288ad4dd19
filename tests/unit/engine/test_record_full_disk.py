"""A disk that is full while `--record` writes: the record ends, the answers go on, and what was written is a record up to there."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rootlet.config.load import load_config
from rootlet.core.errors import Unavailable
from rootlet.core.sampling_params import SamplingParams
from rootlet.engine.hash_model import EOS_ID, HashTemplate, HashTokenizer, hash_executor
from rootlet.engine.inproc import InprocRuntime
from rootlet.engine.model_side import FrontModel, LoadedExecutor
from rootlet.frontend.types import GenerateReq
from rootlet.scheduler import record
from rootlet.scheduler.replay import replay

NUM = 6


def answers(path: Path | None) -> list[list[int]]:
    """What `NUM` requests at once get, recorded into `path`."""
    options = {"ctx_len": 256, "max_total_tokens": 512, "chunked_prefill": 32, "depth": "2", **({"record": str(path)} if path else {})}
    config = load_config(options, {}, None)[0]

    async def go() -> list[list[int]]:
        async with InprocRuntime(config, LoadedExecutor(hash_executor(config), (EOS_ID,)), FrontModel(HashTokenizer(), HashTemplate(), ("h",))) as m:

            async def ask(number: int) -> list[int]:
                req = GenerateReq(prompt=f"prompt {number}", sampling=SamplingParams(max_new_tokens=20, seed=number))
                return [i async for chunk in m.generate(req) for i in chunk.token_ids]

            return await asyncio.gather(*map(ask, range(NUM)))

    return asyncio.run(go())


@pytest.mark.parametrize("num_lines", [1, 2, 7, 30])
def test_the_server_goes_on_without_a_record(num_lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, written, recorders = record.Recorder._write, [], set()

    def until_full(self: record.Recorder, *args: Any, **kwargs: Any) -> None:
        recorders.add(self)
        if len(written) == num_lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(self, *args, **kwargs)
        written.append(args)

    monkeypatch.setattr(record.Recorder, "_write", until_full)
    path = tmp_path / "record"
    assert answers(path) == answers(None)
    (recorder,) = recorders
    assert (len(written), recorder._readings) == (num_lines, []), "nothing more is written, and nothing kept for it"
    outcome = replay(path)
    assert (outcome.differing, outcome.plans <= num_lines) == ([], True)


def test_a_file_that_takes_no_first_line_ends_the_start() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no full device on this system")
    with pytest.raises(Unavailable, match="--record /dev/full: No space left"):
        answers(full)
