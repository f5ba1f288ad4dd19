"""The draw, defined: order of operations of core/sampling_params.py in numpy. The native sampler gives the same tokens and the same logprob bits.

Everything after the float32 logits is float64 built from IEEE add, multiply and divide only (own `exp64` and `log64`, no fma), so two
implementations agree to the bit. Rows never look at each other.

Noise (architecture D6): splitmix64 read at a point. key(seed, choice, j) = mix(mix(mix(seed + G) + choice * G) + j * G); the noise of token i is
h = mix(key + (i + 1) * G), u = ((h >> 12) + 0.5) * 2**-52 in (0, 1), g = -log(-log(u)) (Gumbel). The token drawn is argmax of z + g over the
support, lowest id on ties, where z = (logit - best) / temperature. No state: any draw can be repeated alone.
Support: the `top_k` best by (logit down, id up); of these the shortest prefix whose mass reaches `top_p` of theirs; of these exp(z) >= `min_p`.
Sums over the whole vocabulary run in 8 lanes (lane = id % 8), lanes joined as ((0+4)+(2+6)) + ((1+5)+(3+7)); sums over a sorted support are serial.
Does NOT own: what a request asked for (`sampling.batch` compiles it into a `SampleRow`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2

GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LOG2E = 1.4426950408889634
_LN2_HI = 0.693147180369123816490  # 32 significant bits: n * _LN2_HI is exact for |n| < 2**20
_LN2_LO = 1.90821492927058770002e-10
_EXP_MIN = -708.0
_EXP_COEFFS = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
_LOG_COEFFS = tuple(1.0 / n for n in range(23, 1, -2))  # 1/23, 1/21, ... 1/3
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One pool row's sampling state as arrays. `count_ids` = distinct ids seen in the prompt or output (only when penalties are on),
    `count_out` = how often each was drawn. `drawn` = outputs that exist already. `top_n` < 0: no logprobs wanted. `extra_ids`: ids whose
    logprob is reported after the `top_n` best. `min_new_tokens`: `stop_ids` are masked while fewer outputs exist."""

    pool_row: int
    seed: int
    choice_index: int
    drawn: int
    temperature: float
    greedy: bool
    top_k: int
    top_p: float
    min_p: float
    min_new_tokens: int
    repetition: float
    frequency: float
    presence: float
    stop_ids: I32
    bias_ids: I32
    bias_values: F32
    allowed_ids: I32 | None
    count_ids: I32
    count_out: I32
    has_penalties: bool
    top_n: int
    extra_ids: I32


def exp64(x: F64) -> F64:
    """e**x for x <= 0, to about 1 ulp; exactly 1 at 0, exactly 0 below -708 (no subnormals)."""
    safe = np.maximum(x, _EXP_MIN)
    n = np.rint(safe * _LOG2E)
    r = (safe - n * _LN2_HI) - n * _LN2_LO
    p = np.full_like(r, _EXP_COEFFS[0])
    for c in _EXP_COEFFS[1:]:
        p = p * r + c
    power = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    out: F64 = np.where(x < _EXP_MIN, 0.0, p * power)
    return out


def log64(x: F64) -> F64:
    """Natural logarithm of normal positive x, to about 1 ulp."""
    m, e = np.frexp(x)
    low = m < math.sqrt(0.5)
    m = np.where(low, m * 2.0, m)
    n = (e - low).astype(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = np.full_like(z, _LOG_COEFFS[0])
    for c in _LOG_COEFFS[1:]:
        p = p * z + c
    s2 = s + s
    out: F64 = n * _LN2_HI + (s2 + (s2 * (z * p) + n * _LN2_LO))
    return out


def _mix(h: int) -> int:
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
    return h ^ (h >> 31)


def noise_key(seed: int, choice_index: int, index: int) -> int:
    """The splitmix64 state from which output number `index` of choice `choice_index` reads its noise."""
    h = _mix((seed + GAMMA) & _MASK)
    h = _mix((h + choice_index * GAMMA) & _MASK)
    return _mix((h + index * GAMMA) & _MASK)


def gumbel(key: int, ids: npt.NDArray[Any]) -> F64:
    """Gumbel noise of token `ids` [n] under `key` -> float64 [n]."""
    h: U64 = np.array([key], dtype=np.uint64) + (ids.astype(np.uint64) + np.uint64(1)) * np.array([GAMMA], dtype=np.uint64)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h = h ^ (h >> np.uint64(31))
    u = ((h >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -log64(-log64(u))


def lane_sum(x: F64) -> float:
    """Sum of x [n] in the fixed 8-lane order of the definition."""
    padded = np.zeros(-(-len(x) // 8) * 8)
    padded[: len(x)] = x
    lanes = np.cumsum(padded.reshape(-1, 8), axis=0)[-1]
    a, b = lanes[0] + lanes[4], lanes[2] + lanes[6]
    c, d = lanes[1] + lanes[5], lanes[3] + lanes[7]
    return float((a + b) + (c + d))


def log_sum_exp(row: F32) -> float:
    """log(sum(exp(row))) of float32 [V] in float64; `row` holds a finite maximum."""
    best = float(row.max())
    total = lane_sum(exp64(row.astype(np.float64) - best))
    return best + float(log64(np.array([total]))[0])


def best_ids(row: F32, n: int) -> I64:
    """Ids of the n largest values, best first, lowest id on ties; partial selection, no full sort."""
    n = min(n, len(row))
    if n == 0:
        return np.empty(0, np.int64)
    if n < len(row):
        threshold = np.partition(row, len(row) - n)[len(row) - n]
        candidates = np.flatnonzero(row >= threshold)
    else:
        candidates = np.arange(len(row))
    order = np.lexsort((candidates, -row[candidates].astype(np.float64)))
    return candidates[order[:n]].astype(np.int64)


def finite(row: F32) -> bool:
    """True when a softmax over the row exists: no NaN, no +inf, at least one value above -inf."""
    best = row.max()
    return bool(np.isfinite(best))


class _RowState:
    """A pool row that draws: its compiled request and its sparse counts (slot per seen id)."""

    __slots__ = ("counts", "drawn", "spec")

    def __init__(self, spec: SampleRow) -> None:
        self.spec = spec
        self.drawn = spec.drawn
        self.counts: dict[int, int] = dict(zip(spec.count_ids.tolist(), spec.count_out.tolist(), strict=True))

    def add(self, token: int) -> None:
        self.drawn += 1
        if self.spec.has_penalties:
            self.counts[token] = self.counts.get(token, 0) + 1


def apply_edits(row: F32, state: _RowState) -> None:
    """Allowed ids, min_tokens mask, logit_bias, then penalties, in place on float32 [V]. Sums are float64, clamped to float32's range."""
    spec = state.spec
    if spec.allowed_ids is not None:
        kept = row[spec.allowed_ids].copy()
        row.fill(-np.inf)
        row[spec.allowed_ids] = kept
    if state.drawn < spec.min_new_tokens:
        row[spec.stop_ids] = -np.inf
    if len(spec.bias_ids):
        row[spec.bias_ids] = _narrow(row[spec.bias_ids].astype(np.float64) + spec.bias_values.astype(np.float64))
    if spec.has_penalties and state.counts:
        ids = np.fromiter(state.counts, np.int64, len(state.counts))
        counts = np.fromiter(state.counts.values(), np.float64, len(state.counts))
        x = row[ids].astype(np.float64)
        with np.errstate(over="ignore"):
            x = np.where(x > 0, x / spec.repetition, x * spec.repetition)
        x = (x - spec.frequency * counts) - spec.presence * (counts > 0)
        row[ids] = _narrow(x)


def _narrow(x: F64) -> F32:
    out: F32 = np.where(x == -np.inf, x, np.clip(x, -_F32_MAX, _F32_MAX)).astype(np.float32)
    return out


def support(row: F32, spec: SampleRow) -> tuple[I64, F64]:
    """Ids that can be drawn and their z = (logit - best) / temperature, best first when a filter is on. The row holds a finite maximum."""
    vocab = len(row)
    best = float(row.max())
    filtered = 0 < spec.top_k < vocab
    ids = best_ids(row, spec.top_k if filtered else vocab) if filtered or spec.top_p < 1.0 else np.arange(vocab, dtype=np.int64)
    z = (row[ids].astype(np.float64) - best) / spec.temperature
    if spec.top_p < 1.0:
        mass = exp64(z)
        cum = np.cumsum(mass)
        total = float(cum[-1]) if filtered else lane_sum(exp64((row.astype(np.float64) - best) / spec.temperature))
        before = np.concatenate(([0.0], cum[:-1]))
        keep = max(1, int(np.count_nonzero(before < spec.top_p * total)))
        ids, z = ids[:keep], z[:keep]
    if spec.min_p > 0.0:
        alive = exp64(z) >= spec.min_p
        ids, z = ids[alive], z[alive]
    return ids, z


def draw(row: F32, spec: SampleRow, index: int) -> int:
    """The token that output number `index` takes from edited logits float32 [V]."""
    if spec.greedy:
        return int(row.argmax())
    ids, z = support(row, spec)
    score = z + gumbel(noise_key(spec.seed, spec.choice_index, index), ids)
    return int(ids[score == score.max()].min())


class ReferenceSampleState:
    """Static row state of the reference sampler: `relay` int32 [max_rows + 1] (last token a pool row drew), `tokens` and `status`
    int32 [max_logit_rows] of the rows begun last."""

    def __init__(self, max_rows: int, vocab_size: int, max_logit_rows: int) -> None:
        self.vocab_size = vocab_size
        self.relay: I32 = np.zeros(max_rows + 1, np.int32)
        self.tokens: I32 = np.zeros(max_logit_rows, np.int32)
        self.status: I32 = np.zeros(max_logit_rows, np.int32)
        self._rows: dict[int, _RowState] = {}
        self._pool_rows: list[int] = []
        self._logprobs: list[tuple[float, list[int], list[float]] | None] = []

    def init_row(self, row: SampleRow) -> None:
        """(Re)build a pool row; whatever it held is forgotten."""
        self._rows[row.pool_row] = _RowState(row)

    def begin(self, pool_rows: I32) -> None:
        """Logit row r of the next `sample` belongs to pool_rows[r]."""
        self._pool_rows = pool_rows.tolist()

    def sample(self, logits: Tensor) -> None:
        """logits float32 [>= R, V] -> tokens, status, logprobs and relay; logits are left as they were."""
        values = logits.detach().numpy()
        self._logprobs = [None] * len(self._pool_rows)
        for r, pool_row in enumerate(self._pool_rows):
            state = self._rows[pool_row]
            token, status = self._sample_row(r, values[r].astype(np.float32), state)
            self.tokens[r], self.status[r], self.relay[pool_row] = token, status, token

    def _sample_row(self, r: int, row: F32, state: _RowState) -> tuple[int, int]:
        if not finite(row):
            return 0, NOT_FINITE
        raw = row.copy() if state.spec.top_n >= 0 else None
        apply_edits(row, state)
        if row.max() == -np.inf:
            return 0, NOTHING_ALLOWED
        token = draw(row, state.spec, state.drawn)
        state.add(token)
        if raw is not None:
            self._logprobs[r] = token_logprobs(raw, token, state.spec.top_n, state.spec.extra_ids)
        return token, OK

    def outputs(self, pool_row: int) -> int:
        """How many tokens this row has drawn, those before a retraction included."""
        return self._rows[pool_row].drawn

    def logprobs(self, r: int) -> tuple[float, list[int], list[float]] | None:
        """(logprob of the token, ids, their logprobs) of logit row r, or None when not asked for."""
        return self._logprobs[r]


def token_logprobs(row: F32, token: int, top_n: int, extra_ids: I32) -> tuple[float, list[int], list[float]]:
    """Natural log-softmax of raw float32 [V] at `token`, at the `top_n` best and at `extra_ids`, in float64."""
    lse = log_sum_exp(row)
    ids = [*best_ids(row, top_n).tolist(), *extra_ids.tolist()]
    return float(row[token]) - lse, ids, [float(row[i]) - lse for i in ids]


def raw_logprobs(logits: Tensor, targets: Tensor, top_n: int) -> list[tuple[float, list[int], list[float]] | None]:
    """logits float32 [R, V], targets int [R] -> one entry a row; None where the row has no softmax."""
    none = np.empty(0, np.int32)
    rows = logits.detach().numpy()
    return [token_logprobs(row, int(t), top_n, none) if finite(row) else None for row, t in zip(rows, targets.tolist(), strict=True)]


def sample(logits: Tensor, state: ReferenceSampleState) -> None:
    """The op `sample` of the kernel table."""
    state.sample(logits)
