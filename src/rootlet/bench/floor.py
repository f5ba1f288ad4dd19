"""Speed floor: single-stream decode and prefill of Rootlet beside llama.cpp on the same GGUF file and threads, interleaved in one run.

Rootlet is the whole runtime in one process (scheduler, cache, sampling, detokenising through `Engine`); the peer is llama.cpp's low-level API
(PyPI package llama-cpp-python), which neither samples nor detokenises. `make bench`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from rootlet.bench.calibration import interleave, median_ratio
from rootlet.engine.engine import Engine
from rootlet.engine.model_source import resolve_model

PROMPT, GENERATE, VOCAB_STEP = 512, 64, 7


class LlamaCppPeer:
    """One loaded llama.cpp context; `prefill()` and `decode()` return tokens a second."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = PROMPT + GENERATE + 256, 2048, 512
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def _run(self, tokens: list[int], position: int) -> None:
        batch = self._batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position + i, 1, 0
            batch.logits[i] = i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        assert self.lib.llama_decode(self._context, batch) == 0
        self.lib.llama_synchronize(self._context)

    def prefill(self) -> float:
        self.lib.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        self._run(_prompt(0), 0)
        return PROMPT / (time.perf_counter() - start)

    def decode(self) -> float:
        self.lib.llama_memory_clear(self._memory, True)
        self._run(_prompt(0)[:128], 0)
        start = time.perf_counter()
        for i in range(GENERATE):
            self._run([5 + 31 * i % 1000], 128 + i)
        return GENERATE / (time.perf_counter() - start)


def _prompt(salt: int) -> list[int]:
    return [5 + (VOCAB_STEP * i + 13 * salt) % 40000 for i in range(PROMPT)]


def _ours(engine: Engine) -> tuple[Callable[[], float], Callable[[], float]]:
    salt = iter(range(1, 1_000_000))

    def prefill() -> float:
        start = time.perf_counter()
        engine.generate(_prompt(next(salt)), {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
        return PROMPT / (time.perf_counter() - start)

    def decode() -> float:
        stamps = []
        sampling = {"max_new_tokens": GENERATE + 1, "temperature": 0.0, "ignore_eos": True}
        for _ in engine.generate(_prompt(next(salt))[:128], sampling, stream=True):
            stamps.append(time.perf_counter())
        return GENERATE / (stamps[-1] - stamps[0])

    return prefill, decode


def main() -> None:
    """Print one JSON line per measurement, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    path = str(resolve_model(options.model))
    peer = LlamaCppPeer(path, options.threads)
    with Engine(model=path, threads=options.threads, log_requests=False) as engine:
        prefill, decode = _ours(engine)
        sides = {"rootlet prefill": prefill, "llama.cpp prefill": peer.prefill, "rootlet decode": decode, "llama.cpp decode": peer.decode}
        results = interleave(sides, options.rounds)
    print(json.dumps({"machine": platform.processor() or platform.machine(), "threads": options.threads, "file": os.path.basename(path)}))
    for name, values in results.items():
        unit = "passes/s" if name == "calibration" else "tok/s"
        print(
            json.dumps(
                {
                    "what": name,
                    "unit": unit,
                    "min": round(min(values), 1),
                    "median": round(statistics.median(values), 1),
                    "max": round(max(values), 1),
                }
            )
        )
    for what in ("prefill", "decode"):
        print(f"{what}: rootlet / llama.cpp = {median_ratio(results[f'rootlet {what}'], results[f'llama.cpp {what}']):.2f}")


if __name__ == "__main__":
    main()
