"""Every model family against transformers on tiny random checkpoints, float32: greedy tokens one for one, logits within 1e-4 of their std.

Each case runs on the reference kernels and, where they are built, on the native ones (recorded; recorded = eager is an invisible switch).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fixtures.step_driver import Row, StepDriver
from fixtures.tiny_models import write_gguf
from fixtures.transformers_oracle import CASES, NEW_TOKENS, ODD_CASES, PROMPT_LEN, Oracle, make_oracle
from rootlet.config.schema import CacheArgs, ComputeArgs, ModelArgs, RuntimeConfig, SchedulerArgs
from rootlet.core.types import LogprobSpec
from rootlet.kernels import dispatch
from rootlet.runner.local_executor import LocalExecutor

PAGE = 16
NATIVE = dispatch.choose("auto", page_size=PAGE).native
TABLES = ["reference", *(["native"] if NATIVE else [])]


def executor_for(path: Path, table: str, *, page_size: int = PAGE) -> LocalExecutor:
    return LocalExecutor(
        RuntimeConfig(
            model=ModelArgs(kv_dtype="float32"),
            cache=CacheArgs(page_size=page_size, max_total_tokens=2048),
            scheduler=SchedulerArgs(max_running=8, max_prefill=128, chunked_prefill=64),
            compute=ComputeArgs(kernels=table, threads=1),
        ),
        path,
    )


@pytest.fixture(scope="module", params=sorted(CASES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=TABLES)
def executor(request: pytest.FixtureRequest, oracle: Oracle) -> Iterator[LocalExecutor]:
    made = executor_for(oracle.folder, request.param)
    yield made
    made.close()


def close_logits(executor: LocalExecutor, expected: torch.Tensor, *, row: int = 0) -> bool:
    last = executor.worker.runner.last
    assert last is not None
    return float((last.logits[row] - expected).abs().max()) < 1e-4 * float(expected.std())


def test_checkpoint_tells_models_apart(oracle: Oracle) -> None:
    assert len(set(oracle.tokens)) >= 6


@pytest.mark.parametrize("chunk", [0, 7, 33])
def test_greedy_tokens_and_logits(oracle: Oracle, executor: LocalExecutor, chunk: int) -> None:
    driver = StepDriver(executor)
    row = driver.add(oracle.prompt)
    driver.prefill(row, chunk=chunk)
    assert close_logits(executor, oracle.logits[PROMPT_LEN - 1])
    for k in range(NEW_TOKENS - 1):
        driver.step([(row, 1)])
        assert close_logits(executor, oracle.logits[PROMPT_LEN + k]), f"decode step {k}"
    assert row.outputs == oracle.tokens


@pytest.mark.parametrize("shared_len", [16, 32])
def test_prefix_hit_continues_like_a_whole_prompt(oracle: Oracle, executor: LocalExecutor, shared_len: int) -> None:
    driver = StepDriver(executor)
    first = driver.add(oracle.prompt)
    driver.generate([first], 4)
    other_prompt = [*oracle.prompt[:shared_len], 5, 6, 7, 8, 9]
    again = driver.add(oracle.prompt, share=first, shared_len=shared_len)
    other = driver.add(other_prompt, share=first, shared_len=shared_len)
    assert driver.generate([again, other], 8) == [oracle.tokens[:8], oracle.greedy(other_prompt, 8)]


def test_mixed_batches(oracle: Oracle, executor: LocalExecutor) -> None:
    """One row decodes while others prefill in chunks; extend rows come first in a plan."""
    driver = StepDriver(executor)
    prompts = [oracle.prompt, oracle.prompt[3:30], oracle.prompt[10:]]
    early, *late = (driver.add(p) for p in prompts)
    driver.prefill(early)
    while any(not row.outputs for row in late):
        work: list[tuple[Row, int]] = [(row, min(11, row.prompt_len - row.done)) for row in late if not row.outputs]
        decoding = [row for row in (early, *late) if row.outputs]
        driver.step([*work, *((row, 1) for row in decoding)])
    while any(len(row.outputs) < 12 for row in (early, *late)):
        driver.step([(row, 1) for row in (early, *late)], relay=True)
    outputs = [row.outputs[:12] for row in (early, *late)]
    assert outputs == [oracle.tokens[:12], *(oracle.greedy(p, 12) for p in prompts[1:])]


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_any_page_size(oracle: Oracle, page_size: int) -> None:
    executor = executor_for(oracle.folder, "auto", page_size=page_size)
    driver = StepDriver(executor)
    assert driver.generate([driver.add(oracle.prompt)], NEW_TOKENS, chunk=9) == [oracle.tokens]
    executor.close()


@pytest.mark.parametrize("table", TABLES)
def test_prompt_logprobs(oracle: Oracle, table: str) -> None:
    executor = executor_for(oracle.folder, table)
    driver = StepDriver(executor)
    row = driver.add(oracle.prompt, logprobs=LogprobSpec(top_n=2, prompt_start=0))
    driver.prefill(row, chunk=17)
    entries = [entry for result in driver.results for entry in result.rows[0].prompt_logprobs]
    expected = torch.log_softmax(oracle.logits.double(), dim=-1)
    assert [entry.token_id for entry in entries] == oracle.prompt[1:]
    for position, entry in enumerate(entries):
        best = expected[position].topk(2)
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-3)
        assert entry.top_ids == tuple(best.indices.tolist())
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-3)
    executor.close()


@pytest.mark.parametrize("case", ODD_CASES)
def test_odd_sizes_and_flags(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(case, tmp_path / "hf")
    paths = [oracle.folder, *([write_gguf(oracle.folder, tmp_path / "model.gguf")] if ODD_CASES[case][2] else [])]
    for path, table in itertools.product(paths, TABLES):
        executor = executor_for(path, table)
        driver = StepDriver(executor)
        assert driver.generate([driver.add(oracle.prompt)], NEW_TOKENS, chunk=9) == [oracle.tokens], (path.name, table)
        assert close_logits(executor, oracle.logits[-2]), (path.name, table)
        executor.close()


@pytest.mark.parametrize("case", ["llama31-tied", "qwen2", "qwen3-tied", "smollm3-tied"])
@pytest.mark.parametrize("table", TABLES)
def test_gguf_of_the_same_weights(case: str, table: str, tmp_path: Path) -> None:
    """Pair-interleaved q and k, rope factors, tied heads: the same model through the other format."""
    oracle = make_oracle(case, tmp_path)
    executor = executor_for(write_gguf(tmp_path, tmp_path / "model.gguf").rename(tmp_path.parent / f"{tmp_path.name}.gguf"), table)
    driver = StepDriver(executor)
    assert driver.generate([driver.add(oracle.prompt)], NEW_TOKENS, chunk=9) == [oracle.tokens]
    assert close_logits(executor, oracle.logits[-2])
    executor.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("table", TABLES)
def test_half_precision_weights_with_float32_arithmetic(dtype: str, table: str, tmp_path: Path) -> None:
    oracle = make_oracle("qwen3", tmp_path, dtype=dtype)
    executor = executor_for(tmp_path, table)
    assert executor.info["weights"] == {"bf16" if dtype == "bfloat16" else "f16": 18}
    driver = StepDriver(executor)
    assert driver.generate([driver.add(oracle.prompt)], NEW_TOKENS) == [oracle.tokens]
    assert close_logits(executor, oracle.logits[-2])
    executor.close()
