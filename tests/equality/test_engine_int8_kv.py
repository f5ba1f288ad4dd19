"""int8 KV on the whole runtime: other numbers than float16, but the same invisible switches, bit for bit."""

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
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, " * 8,
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a village by the sea, " * 6,
]
GREEDY = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
Reply = tuple[tuple[int, ...], tuple[float | None, ...]]


def replies(*, alone: bool = False, rounds: int = 1, **knobs: Any) -> list[Reply]:
    """Token ids and their log-probabilities of every prompt, of the last round."""
    with Engine(PATH, log_level="warning", log_requests=False, threads=2, max_total_tokens=4096, kv_dtype="int8", **knobs) as engine:
        for _ in range(rounds):
            results = [engine.generate(p, GREEDY, logprobs=0) for p in PROMPTS] if alone else engine.generate(PROMPTS, GREEDY, logprobs=0)
        ready = engine.manager.ready_info
    assert ready is not None
    assert ready.info["kv_dtype"] == "int8"
    return [(r.token_ids, tuple(e.logprob for e in r.logprobs)) for r in results]


def test_int8_kv_keeps_every_bit_in_a_batch_cached_chunked_and_eager() -> None:
    want = replies(alone=True, prefix_cache=False, chunked_prefill=0)
    assert replies() == want, "in a batch"
    assert replies(rounds=2, page_size=64) == want, "from the cache"
    assert replies(chunked_prefill=16, mixed_chunk=True) == want, "in chunks of 16"
    assert replies(graph=False) == want, "eager"
