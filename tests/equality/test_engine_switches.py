"""Invisible switches on the whole runtime (scheduler, cache, executor, sampler) with the default model: tokens and log-probabilities, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from rootlet.engine.engine import Engine
from rootlet.engine.model_source import DEFAULT_MODEL, cache_folder

PATH = cache_folder() / DEFAULT_MODEL.file_name
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not PATH.exists(), reason="needs the default model: `make model` fetches it"),
]

SHARED = "You are a careful assistant who answers in whole sentences and never guesses. " * 3
PROMPTS = [
    SHARED + "What is the largest ocean on Earth?",
    SHARED + "What is the largest desert on Earth? Say why it is so dry.",
    SHARED + "What is the largest ocean on Earth?",
    "The capital of France is",
    "Once upon a time, in a village by the sea, " * 8,
    "1, 2, 3, 4, 5,",
]
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
SEEDED = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1, "presence_penalty": 0.3, "ignore_eos": True}
Reply = tuple[tuple[int, ...], tuple[float | None, ...]]


def replies(sampling: dict[str, Any], *, alone: bool = False, twice: bool = False, **knobs: Any) -> list[Reply]:
    """Token ids and their raw log-probabilities (top 2 too) of every prompt; `twice`: of the second time, when all is cached."""
    knobs = {"threads": 2, "max_total_tokens": 16384, "max_prefill": 1024} | knobs
    retract_every = knobs.pop("retract_every", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOTLET_TEST_RETRACT", str(retract_every))
        engine_of = Engine(PATH, log_level="warning", log_requests=False, **knobs)
    with engine_of as engine:
        for _ in range(2 if twice else 1):
            results = [engine.generate(p, sampling, logprobs=2) for p in PROMPTS] if alone else engine.generate(PROMPTS, sampling, logprobs=2)
        state = engine.state("metrics")
    if retract_every:
        assert state["counters"]["retractions"] > 0
    return [(r.token_ids, tuple(x for e in r.logprobs for x in (e.logprob, *e.top_logprobs))) for r in results]


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[Reply]]:
    """The sampling, and the truth: every prompt alone, whole, uncached, one step in flight."""
    return request.param, replies(request.param, alone=True, prefix_cache=False, chunked_prefill=0, depth="1")


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"depth": "2"},
        {"prefix_cache": False},
        {"twice": True},
        {"twice": True, "page_size": 64, "depth": "2"},
        {"chunked_prefill": 16},
        {"chunked_prefill": 64, "mixed_chunk": True},
        {"chunked_prefill": 512, "depth": "2", "mixed_chunk": True},
        {"retract_every": 1},
        {"retract_every": 2, "depth": "2"},
        {"retract_every": 3, "chunked_prefill": 16},
        {"schedule_policy": "lpm", "max_running": 2},
        {"schedule_policy": "vtc", "max_running": 2, "decode_interval": 2},
        {"schedule_policy": "dfs-weight", "max_running": 3, "min_free_slots": 2, "depth": "2"},
        {"graph": False},
        {"threads": 1},
    ],
    ids=lambda k: "-".join(f"{name}={value}" for name, value in k.items()) or "batched",
)
def test_a_switch_changes_no_bit(case: tuple[dict[str, Any], list[Reply]], knobs: dict[str, Any]) -> None:
    sampling, truth = case
    assert replies(sampling, **knobs) == truth
