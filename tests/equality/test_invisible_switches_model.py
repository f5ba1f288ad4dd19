"""Invisible switches on real forwards (architecture 8): the bits of a row's logits do not depend on batch, position in it, chunking, sharing, graph
or threads. On a tiny random model with both kernel tables, and on the default model (marker `model`) with the native one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.step_driver import Row, StepDriver
from fixtures.transformers_oracle import make_oracle
from rootlet.config.schema import CacheArgs, ComputeArgs, RuntimeConfig, SchedulerArgs
from rootlet.core.step import ControlOp
from rootlet.core.types import LogprobSpec
from rootlet.engine.model_source import DEFAULT_MODEL, cache_folder
from rootlet.kernels import dispatch
from rootlet.runner.local_executor import LocalExecutor

NATIVE = dispatch.choose("auto", page_size=16).native
SUBJECTS = [
    "tiny-reference",
    *(["tiny-native", pytest.param("default-native", marks=pytest.mark.model)] if NATIVE else []),
]
BATCH = 16


def default_model() -> Path:
    path = Path(os.environ.get("ROOTLET_TEST_MODEL", cache_folder() / DEFAULT_MODEL.file_name))
    if not path.exists():
        pytest.skip(f"no default model at {path}; `rootlet serve` fetches it, or set ROOTLET_TEST_MODEL")
    return path


def executor_for(path: Path, subject: str, *, threads: int = 1, threaded: bool = False) -> LocalExecutor:
    tiny = subject.startswith("tiny")
    return LocalExecutor(
        RuntimeConfig(
            cache=CacheArgs(max_total_tokens=4096 if tiny else 8192),
            scheduler=SchedulerArgs(max_running=2 * BATCH, max_prefill=1024),
            compute=ComputeArgs(kernels=subject.rpartition("-")[2], threads=threads),
        ),
        path,
        threaded=threaded,
    )


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(subject: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_oracle("qwen3", tmp_path_factory.mktemp("tiny")).folder if subject.startswith("tiny") else default_model()


@pytest.fixture(scope="module")
def executor(subject: str, path: Path) -> Iterator[LocalExecutor]:
    made = executor_for(path, subject)
    yield made
    made.close()


def prompt(executor: LocalExecutor, length: int, seed: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(2, executor.capacity.vocab_size, length)
    return [int(i) for i in ids]


def long_len(executor: LocalExecutor) -> int:
    return min(700, executor.capacity.max_context_len - 50)


def logits_of(driver: StepDriver, work: Sequence[tuple[Row, int]], index: int) -> torch.Tensor:
    """Logits of logit row `index` of a step that is run and forgotten: the rows stay where they were."""
    driver.executor.submit(driver.plan(work))
    result = driver.executor.collect()
    assert all(row.error is None for row in result.rows)
    return driver.executor.worker.runner.last.logits[index].clone()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_alone_equals_every_position_of_a_batch(executor: LocalExecutor) -> None:
    driver = StepDriver(executor)
    rows = [driver.add(prompt(executor, 20 + 3 * i, seed=i)) for i in range(BATCH)]
    for row in rows:
        driver.prefill(row)
    one, others = rows[0], [(row, 1) for row in rows[1:]]
    alone = logits_of(driver, [(one, 1)], 0)
    for at in range(BATCH):
        batch = [*others[:at], (one, 1), *others[at:]]
        assert torch.equal(bits(logits_of(driver, batch, at)), bits(alone)), f"position {at} of {BATCH}"


def test_every_batch_size_gives_the_same_bits(executor: LocalExecutor) -> None:
    driver = StepDriver(executor)
    rows = [driver.add(prompt(executor, 17 + 5 * i, seed=40 + i)) for i in range(BATCH)]
    for row in rows:
        driver.prefill(row)
    alone = [logits_of(driver, [(row, 1)], 0) for row in rows]
    for size in (2, 3, 5, 8, 11, 16):
        for i in range(size):
            assert torch.equal(bits(logits_of(driver, [(row, 1) for row in rows[:size]], i)), bits(alone[i])), f"row {i} of {size}"
            if size > 3:
                break


@pytest.mark.parametrize("chunk", [16, 64, 100, 512])
def test_chunked_equals_whole(executor: LocalExecutor, chunk: int) -> None:
    driver = StepDriver(executor)
    ids = prompt(executor, long_len(executor), seed=1)
    outcomes = []
    for size in (0, chunk):
        row = driver.add(ids)
        driver.prefill(row, chunk=size)
        outcomes.append((row.outputs, executor.worker.runner.last.logits[0].clone(), logits_of(driver, [(row, 1)], 0)))
    (tokens, last, step), (chunked_tokens, chunked_last, chunked_step) = outcomes
    assert chunked_tokens == tokens
    assert torch.equal(bits(chunked_last), bits(last))
    assert torch.equal(bits(chunked_step), bits(step))


@pytest.mark.parametrize("shared_len", [16, 128, 400])
def test_cached_prefix_equals_recomputed(executor: LocalExecutor, shared_len: int) -> None:
    driver = StepDriver(executor)
    ids = prompt(executor, min(long_len(executor), 450), seed=2)
    first = driver.add(ids)
    driver.prefill(first)
    expected = executor.worker.runner.last.logits[0].clone()
    hit = driver.add(ids, share=first, shared_len=shared_len)
    driver.prefill(hit)
    assert torch.equal(bits(executor.worker.runner.last.logits[0]), bits(expected))


def test_prefill_beside_others_equals_alone(executor: LocalExecutor) -> None:
    """Mixed: an extend row, a middle chunk and decode rows in one plan."""
    driver = StepDriver(executor)
    decoding = [driver.add(prompt(executor, 30 + i, seed=60 + i)) for i in range(3)]
    for row in decoding:
        driver.prefill(row)
    fresh, middle = driver.add(prompt(executor, 45, seed=70)), driver.add(prompt(executor, 90, seed=71))
    alone = [logits_of(driver, [(fresh, 45)], 0), *(logits_of(driver, [(row, 1)], 0) for row in decoding)]
    mixed = [(fresh, 45), (middle, 50), *((row, 1) for row in decoding)]
    for i, expected in enumerate(alone):
        assert torch.equal(bits(logits_of(driver, mixed, i)), bits(expected)), f"logit row {i}"


def test_graph_equals_eager(executor: LocalExecutor) -> None:
    runner = executor.worker.runner
    if runner.graph is None:
        pytest.skip("this kernel table records no graph")
    driver = StepDriver(executor)
    row = driver.add(prompt(executor, 77, seed=3))
    recorded = [logits_of(driver, [(row, 77)], 0)]
    driver.prefill(row)
    recorded.append(logits_of(driver, [(row, 1)], 0))
    graph, runner.graph = runner.graph, None
    try:
        again = driver.add(row.tokens[:77])
        eager = [logits_of(driver, [(again, 77)], 0)]
        driver.prefill(again)
        eager.append(logits_of(driver, [(again, 1)], 0))
    finally:
        runner.graph = graph
    assert again.tokens == row.tokens
    for a, b in zip(recorded, eager, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_profile_names_the_ops(executor: LocalExecutor) -> None:
    if executor.worker.runner.graph is None:
        pytest.skip("this kernel table records no graph")
    executor.control(ControlOp("profile", {"on": True}))
    driver = StepDriver(executor)
    driver.prefill(driver.add(prompt(executor, 20, seed=3)))
    times = executor.control(ControlOp("profile", {"on": False}))
    assert times["attention"]["calls"] == executor.info["num_layers"]
    assert times["attention"]["seconds"] > 0


def test_threads_do_not_change_bits(executor: LocalExecutor, subject: str, path: Path) -> None:
    def outcome(made: LocalExecutor) -> list[torch.Tensor]:
        driver = StepDriver(made)
        rows = [driver.add(prompt(made, 70, seed=4)), driver.add(prompt(made, 33, seed=5))]
        whole = [logits_of(driver, [(row, row.prompt_len)], 0) for row in rows]
        for row in rows:
            driver.prefill(row)
        return [*whole, *(logits_of(driver, [(row, 1) for row in rows], i) for i in range(2))]

    one = outcome(executor)
    other = executor_for(path, subject, threads=2)
    try:
        two = outcome(other)
    finally:
        other.close()
        dispatch.choose(subject.rpartition("-")[2], page_size=16).set_threads(1)  # the team is the process's, not the executor's
    for a, b in zip(one, two, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_prompt_logprobs_do_not_depend_on_chunks(executor: LocalExecutor) -> None:
    ids = prompt(executor, 100, seed=6)
    answers = []
    for chunk in (0, 64, 9):
        driver = StepDriver(executor)
        row = driver.add(ids, logprobs=LogprobSpec(top_n=3, prompt_start=0))
        driver.prefill(row, chunk=chunk)
        answers.append([entry for result in driver.results for entry in result.rows[0].prompt_logprobs])
    assert [entry.token_id for entry in answers[0]] == ids[1:]
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_relay_equals_ids_that_the_host_knows(executor: LocalExecutor) -> None:
    driver = StepDriver(executor)
    told, relayed = driver.add(prompt(executor, 40, seed=8)), driver.add(prompt(executor, 40, seed=8))
    assert driver.generate([told], 8) == driver.generate([relayed], 8, relay=True)


def test_poisoned_row_fails_alone(executor: LocalExecutor) -> None:
    """NaN in one request's pages ends that request; its neighbour keeps its bits."""
    driver = StepDriver(executor)
    good, bad = driver.add(prompt(executor, 40, seed=9)), driver.add(prompt(executor, 40, seed=10))
    for row in (good, bad):
        driver.prefill(row)
    alone = logits_of(driver, [(good, 1)], 0)
    pool = executor.worker.pool
    pool.layer(0).v[bad.pages[0]] = float("nan")
    executor.submit(driver.plan([(bad, 1), (good, 1)]))
    result = executor.collect()
    pool.layer(0).v[bad.pages[0]] = 0.0
    assert result.rows[0].error is not None
    assert "finite" in result.rows[0].error
    assert result.rows[1].error is None
    assert torch.equal(bits(executor.worker.runner.last.logits[1]), bits(alone))


def test_two_plans_in_flight_equal_one_at_a_time(subject: str, path: Path, executor: LocalExecutor) -> None:
    """Overlap: each plan is made before the tokens of the one before are known, on the forward's own thread."""
    ids = [prompt(executor, 20 + 9 * i, seed=80 + i) for i in range(3)]
    driver = StepDriver(executor)
    expected = driver.generate([driver.add(p) for p in ids], 6)
    overlapped = executor_for(path, subject, threaded=True)
    try:
        driver = StepDriver(overlapped)
        rows = [driver.add(p) for p in ids]
        works = [[(row, row.prompt_len)] for row in rows] + [[(row, 1) for row in rows]] * 5
        flying: list[list[tuple[Row, int]]] = []
        for work in works:
            overlapped.submit(driver.plan(work, relay=True))
            for row, n in work:
                row.done += n
            flying.append(work)
            if len(flying) == 2:
                land(overlapped, flying.pop(0))
        land(overlapped, flying.pop(0))
    finally:
        overlapped.close()
    assert [row.outputs for row in rows] == expected


def land(executor: LocalExecutor, work: list[tuple[Row, int]]) -> None:
    for (row, _), answer in zip(work, executor.collect().rows, strict=True):
        row.tokens += answer.tokens


def test_empty_plan_only_applies_its_deltas(executor: LocalExecutor) -> None:
    driver = StepDriver(executor)
    executor.submit(driver.plan([]))
    assert executor.collect().rows == ()
