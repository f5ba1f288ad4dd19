"""llama.cpp as a peer: its low-level API (PyPI package llama-cpp-python), on a GGUF file as it is or requantised to Q4_0, its fastest type.

Measures batches of tokens only: it neither samples nor detokenises here, so the comparison leans its way. Owns one context at a time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Q4_0_FTYPE = 2
BATCH_TOKENS = 2048


_silent: Any = None


def _silence() -> None:
    """Once a process; the callback is kept alive, because the library calls it later."""
    global _silent
    import llama_cpp

    if _silent is None:
        _silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))


FTYPES = {"q4_0": Q4_0_FTYPE, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9}
"""llama.cpp's numbers of file types (LLAMA_FTYPE_MOSTLY_*)."""


def requantized(source: Path, folder: Path, kind: str = "q4_0", *, pure: bool = False) -> Path:
    """`source` as `kind`, made once in `folder` by llama.cpp itself. `pure`: every matrix, not only those that llama.cpp would choose."""
    import llama_cpp

    target = folder / f"{source.stem}.{kind.upper()}.gguf"
    if not target.exists():
        _silence()
        params = llama_cpp.llama_model_quantize_default_params()
        params.allow_requantize, params.ftype, params.pure = True, FTYPES[kind], pure
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
        assert not failed, f"llama.cpp could not requantise {source}"
    return target


class LlamaCpp:
    """One loaded model with room for `context` tokens over `sequences` sequences in one unified cache."""

    def __init__(self, path: Path, *, threads: int, context: int, sequences: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        _silence()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = context, BATCH_TOKENS, 512, sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)

    def share(self, sequences: int) -> None:
        """All sequences begin with what sequence 0 holds."""
        for s in range(1, sequences):
            self._lib.llama_memory_seq_cp(self._memory, 0, s, -1, -1)

    def cut(self, sequence: int, position: int) -> None:
        """Forgets `sequence` from `position` on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, position, -1)

    def prefill(self, tokens: Sequence[int], *, start: int = 0, sequence: int = 0) -> float:
        """Seconds."""
        begin = time.perf_counter()
        for at in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[at : at + BATCH_TOKENS]
            for i, token in enumerate(part):
                self._put(i, token, start + at + i, sequence, logits=at + i == len(tokens) - 1)
            self._run(len(part))
        return time.perf_counter() - begin

    def decode(self, steps: int, *, start: int, sequences: int) -> float:
        """Seconds of `steps` steps, one token of each sequence."""
        begin = time.perf_counter()
        for step in range(steps):
            for s in range(sequences):
                self._put(s, (step * 31 + s) % 40000 + 5, start + step, s, logits=True)
            self._run(sequences)
        return time.perf_counter() - begin

    def _put(self, i: int, token: int, position: int, sequence: int, *, logits: bool) -> None:
        batch = self._batch
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, position, 1, sequence, logits

    def _run(self, count: int) -> None:
        self._batch.n_tokens = count
        assert self._lib.llama_decode(self._context, self._batch) == 0, "llama_decode failed"
        self._lib.llama_synchronize(self._context)
