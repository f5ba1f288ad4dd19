"""The definition behind `HashLM`: logits, draws and log-probabilities as functions of a prefix's hash, and what a request must give by them.

No executor, no pages, no state: `reference_generate` sees nothing but tokens, so it is an independent answer to compare an executor with.
top_p and min_p are not modelled; every other field of `SamplingParams` is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import LogprobSpec, TokenLogprob

U64 = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
ROOT = 0x9E3779B97F4A7C15
"""Hash of the empty prefix."""


def _mix(*words: int) -> int:
    """splitmix64 finaliser folded over `words`."""
    h = ROOT
    for w in words:
        h = (h ^ (w & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        h ^= h >> 29
        h = h * 0x94D049BB133111EB & _MASK
        h ^= h >> 32
    return h


def _units(seed: int, vocab_size: int) -> Floats:
    """[V] numbers in (0, 1), a function of `seed` and the column."""
    x: U64 = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.full(vocab_size, seed, dtype=np.uint64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)


@dataclass(frozen=True, slots=True)
class HashModel:
    """The "weights". `eos_rate`: share of prefixes after which `eos_id` has by far the largest logit; elsewhere it has the smallest."""

    vocab_size: int = 64
    eos_id: int = 2
    eos_rate: float = 0.0

    def extend(self, prefix: int, position: int, token: int) -> int:
        """Hash of the prefix that ends with `token` at `position`."""
        return _mix(prefix, position, token)

    def logits(self, prefix: int) -> Floats:
        """[V] raw logits after this prefix."""
        logits = 8.0 * _units(prefix, self.vocab_size)
        ends = _mix(prefix, 0xE05) / 2.0**64 < self.eos_rate
        logits[self.eos_id] = 60.0 if ends else -60.0
        return logits

    def logprob(self, logits: Floats, token: int, spec: LogprobSpec) -> TokenLogprob:
        """Closed form: log softmax of the raw logits; alternatives best first, lowest id on ties."""
        top = float(logits.max())
        logprobs = logits - (top + float(np.log(np.exp(logits - top).sum())))
        best = np.argsort(-logits, kind="stable")[: spec.top_n]
        return TokenLogprob(int(token), float(logprobs[token]), tuple(int(i) for i in best), tuple(float(logprobs[i]) for i in best))


def draw(model: HashModel, logits: Floats, params: SamplingParams, *, history: Sequence[int], prompt_len: int, stop_ids: Iterable[int]) -> int:
    """The token that follows `history` (prompt + outputs): order of operations of `core/sampling_params.py`, Gumbel-max with counter noise."""
    x = logits.copy()
    outputs = history[prompt_len:]
    if params.allowed_token_ids is not None:
        banned = np.ones(model.vocab_size, dtype=bool)
        banned[list(params.allowed_token_ids)] = False
        x[banned] = -np.inf
    if len(outputs) < params.min_new_tokens:
        x[list(stop_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.has_penalties:
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.asarray(history, dtype=np.int64))
            x[seen] = np.where(x[seen] < 0, x[seen] * params.repetition_penalty, x[seen] / params.repetition_penalty)
        counts = np.bincount(np.asarray(outputs, dtype=np.int64), minlength=model.vocab_size)
        x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    if params.is_greedy:
        return int(np.argmax(x))
    x /= params.temperature
    if 0 < params.top_k < model.vocab_size:
        cut = np.argsort(-x, kind="stable")[params.top_k :]
        x[cut] = -np.inf
    noise = _units(_mix(params.seed or 0, params.choice_index, len(outputs)), model.vocab_size)
    return int(np.argmax(x - np.log(-np.log(noise))))


@dataclass(slots=True)
class Reference:
    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    stopped: bool


def reference_generate(
    model: HashModel,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...] = (),
    eos_ids: tuple[int, ...] | None = None,
    logprobs: LogprobSpec | None = None,
) -> Reference:
    """What a request must give, computed straight from the definition. `stop_ids` end a generation always, `eos_ids` unless `ignore_eos`."""
    eos = (model.eos_id,) if eos_ids is None else eos_ids
    ends = set(stop_ids) | (set() if params.ignore_eos else set(eos))
    masked = tuple(eos) + tuple(stop_ids)
    spec = logprobs or LogprobSpec()
    out = Reference([], [], [], False)
    start = spec.prompt_start
    if start == 0:
        out.prompt_logprobs.append(TokenLogprob(int(prompt[0]), None))
    prefix = ROOT
    history: list[int] = []
    for position, token in enumerate(prompt):
        if start is not None and position >= max(start, 1):
            out.prompt_logprobs.append(model.logprob(model.logits(prefix), token, spec))
        prefix = model.extend(prefix, position, token)
        history.append(int(token))
    while len(out.tokens) < max_new_tokens:
        logits = model.logits(prefix)
        token = draw(model, logits, params, history=history, prompt_len=len(prompt), stop_ids=masked)
        out.tokens.append(token)
        if logprobs is not None:
            out.logprobs.append(model.logprob(logits, token, spec))
        prefix = model.extend(prefix, len(history), token)
        history.append(token)
        if token in ends and len(out.tokens) > params.min_new_tokens:
            out.stopped = True
            break
    return out
