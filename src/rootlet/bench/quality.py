"""What quantised arithmetic, and a quantised KV cache (--kv-dtype int8), cost in quality: the native path on the file's own blocks against
its weights dequantised to float32.

Both sides score the same GSM8K questions with their answers; the reference side runs `dtype=float32` with a float32 KV cache, so nothing of it
is quantised. Printed: mean absolute difference of log-probabilities, and the ratio of perplexities. `make bench-quality`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from rootlet.core.types import LogprobSpec
from rootlet.engine.engine import Engine
from rootlet.engine.results import GenerateResult

LIMIT = 0.005


def score(texts: list[str], **knobs: Any) -> tuple[list[float], dict[str, Any]]:
    """Log-probability of every token of every text but the first of each, in order, and the engine's facts."""
    with Engine(log_level="warning", log_requests=False, prefix_cache=False, **knobs) as engine:
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        results = engine.generate(texts, sampling, logprobs=LogprobSpec(prompt_start=0))
        ready = engine.manager.ready_info
        facts = dict(ready.info) if ready is not None else {}
    logprobs: list[float] = []
    assert isinstance(results, list), "a list of prompts gives a list of results"
    for result in results:
        assert isinstance(result, GenerateResult), "one choice a prompt"
        logprobs += [entry.logprob for entry in result.prompt_logprobs or () if entry.logprob is not None]
    return logprobs, facts


def main() -> None:
    """Print one line a measure; exit 1 when the perplexity ratio leaves 1 +- 0.5 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--model")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--kv-dtype", default="auto", help="KV cache of the quantised side")
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.data / "gsm8k_test.jsonl").read_text().splitlines()[: options.questions]]
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]
    native, facts = score(texts, model=options.model, kv_dtype=options.kv_dtype)
    exact, _ = score(texts, model=options.model, dtype="float32", kv_dtype="float32")
    assert len(native) == len(exact)
    difference = statistics.fmean(abs(a - b) for a, b in zip(native, exact, strict=True))
    perplexity = {name: math.exp(-statistics.fmean(values)) for name, values in (("native", native), ("float32", exact))}
    ratio = perplexity["native"] / perplexity["float32"]
    print(f"model {facts.get('model')}, weights {facts.get('weights')}, kernels {facts.get('kernels')}, KV {facts.get('kv_dtype')}")
    print(f"{len(texts)} questions with answers, {len(native)} tokens")
    print(f"mean absolute log-probability difference {difference:.5f}")
    print(f"perplexity native {perplexity['native']:.4f}, dequantised float32 {perplexity['float32']:.4f}, ratio {ratio:.5f} (limit 1 +- {LIMIT})")
    raise SystemExit(0 if abs(ratio - 1.0) <= LIMIT else 1)


if __name__ == "__main__":
    main()
