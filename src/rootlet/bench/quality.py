"""What quantised arithmetic, and a quantised KV cache (--kv-dtype int8), cost in quality: the native path on the file's own blocks against
its weights dequantised to float32.

Both sides score the same GSM8K questions with their answers; the reference side runs `dtype=float32` with a float32 KV cache, so nothing of it
is quantised. Printed: mean absolute difference of log-probabilities, and the ratio of perplexities with its standard error. `make bench-quality`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rootlet.bench.llamacpp import FTYPES, requantized
from rootlet.core.types import LogprobSpec
from rootlet.engine.engine import Engine
from rootlet.engine.model_source import resolve_model
from rootlet.engine.results import GenerateResult

LIMIT = 0.003
INT8_KV_LIMIT = 0.005


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


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-statistics.fmean(logprobs))


def compare(what: str, found: list[float], exact: list[float], limit: float) -> bool:
    """Print how far `found` is from `exact`, token by token and in perplexity; whether the ratio keeps the limit."""
    differences = [b - a for a, b in zip(found, exact, strict=True)]
    mean, error = statistics.fmean(map(abs, differences)), statistics.stdev(differences) / math.sqrt(len(differences))
    mine, theirs = perplexity(found), perplexity(exact)
    ratio = mine / theirs
    print(f"{what}: mean absolute log-probability difference {mean:.5f}; perplexity {mine:.4f} against {theirs:.4f},", end=" ")
    print(f"ratio {ratio:.5f} +- {ratio * error:.5f} (limit 1 +- {limit})", flush=True)
    return abs(ratio - 1.0) <= limit


def run_types(texts: list[str], source: Path, kinds: list[str]) -> bool:
    """The model requantised by llama.cpp to each type, natively against its own weights as float32; KV float32 on both sides."""
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = str(requantized(source, Path(folder), kind, pure=True))
            native, facts = score(texts, model=path, kv_dtype="float32")
            exact, _ = score(texts, model=path, dtype="float32", kv_dtype="float32")
            kept &= compare(f"weights {facts.get('weights')}", native, exact, LIMIT)
    return kept


def run_model(texts: list[str], model: str | None, kv_dtype: str) -> bool:
    """The native path against float32 weights and cache; an int8 cache also against a float16 one under the same weights."""
    native, facts = score(texts, model=model, kv_dtype=kv_dtype)
    exact, _ = score(texts, model=model, dtype="float32", kv_dtype="float32")
    print(f"model {facts.get('model')}, weights {facts.get('weights')}, kernels {facts.get('kernels')}, KV {facts.get('kv_dtype')}")
    int8 = kv_dtype == "int8"
    kept = compare(f"KV {facts.get('kv_dtype')} against dequantised float32", native, exact, INT8_KV_LIMIT if int8 else LIMIT)
    if int8:
        half, _ = score(texts, model=model, kv_dtype="float16")
        kept &= compare("KV float16 against dequantised float32", half, exact, LIMIT)
        kept &= compare("KV int8 against KV float16, same weights", native, half, INT8_KV_LIMIT)
    return kept


def main() -> None:
    """Print one line a measure; exit 1 when a perplexity ratio leaves its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path, help="folder with gsm8k_test.jsonl")
    parser.add_argument("--model")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--kv-dtype", default="auto", help="KV cache of the quantised side; int8 is also compared with float16")
    parser.add_argument("--types", help=f"weight types to requantise to and compare, of {','.join(FTYPES)} (needs llama-cpp-python)")
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.data / "gsm8k_test.jsonl").read_text().splitlines()[: options.questions]]
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]
    print(f"{len(texts)} questions with answers")
    if options.types:
        kept = run_types(texts, resolve_model(options.model), options.types.split(","))
    else:
        kept = run_model(texts, options.model, options.kv_dtype)
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
