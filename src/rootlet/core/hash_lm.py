"""HashLM: an executor without a model, whose every wrong page, row, position or reuse becomes an assertion or another token.

The content of a KV slot is (position, token, hash of the prefix up to and including that token). A forward walks each row's page table, which it
builds from the deltas of the plans alone, and asserts that the slots spell the row's prefix; then it writes its own slots. Logits are a function
of the prefix hash, so the next token is a function of (prefix, sampling parameters, seed, choice, output number): `reference_generate` computes
the same tokens without any scheduler. Used by tests, the simulator's checks and `bench` of the control wing. Does not model time.
top_p and min_p are not modelled; every other field of `SamplingParams` is. Source: docs/scheduler (harness, hash-chain LM).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import RELAY, Capacity, ControlOp, IntArray, RowInit, RowResult, StepPlan, StepResult
from rootlet.core.types import LogprobSpec, TokenLogprob

U64 = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_ROOT = 0x9E3779B97F4A7C15
POISON = -7


def _mix(*words: int) -> int:
    """splitmix64 finaliser folded over `words`."""
    h = _ROOT
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
    prefix = _ROOT
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


@dataclass(slots=True)
class _Row:
    """What the executor keeps of a pool row between steps: the history it was given and drew, and its hash chain (chain[i] = prefix of i tokens)."""

    init: RowInit
    history: list[int]
    chain: list[int] = field(default_factory=lambda: [_ROOT])


class HashLM:
    """`Executor` over `HashModel`. `mode` "eager" runs a plan at submit, "late" at collect (the worst case for early reuse).

    `poison(pages)` marks freed pages, in order with the plans. `fail(rid)` makes the next sampled or chunk row of that request fail alone.
    Raises AssertionError whenever a plan names a slot whose content is not the row's prefix.
    """

    def __init__(self, capacity: Capacity, *, model: HashModel | None = None, mode: Literal["eager", "late"] = "eager") -> None:
        self.model = model or HashModel(vocab_size=capacity.vocab_size)
        self.plans_run = 0
        self._capacity = capacity
        self._late = mode == "late"
        slots = (capacity.num_pages + 1) * capacity.page_size
        self._slot_position = np.full(slots, POISON, dtype=np.int64)
        self._slot_token = np.full(slots, POISON, dtype=np.int64)
        self._slot_hash = np.zeros(slots, dtype=np.uint64)
        self._table = np.zeros((capacity.max_rows + 1, capacity.max_pages_per_row), dtype=np.int32)
        self._rows: dict[int, _Row] = {}
        self._relay = np.full(capacity.max_rows + 1, POISON, dtype=np.int64)
        self._queue: deque[StepPlan | tuple[int, ...]] = deque()
        self._done: deque[StepResult] = deque()
        self._failing: set[str] = set()

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)
        if not self._late:
            self._drain()

    def collect(self) -> StepResult:
        while not self._done:
            assert self._queue, "collect() without a plan in flight"
            self._run_next()
        return self._done.popleft()

    def control(self, op: ControlOp) -> dict[str, Any]:
        if op.name == "flush":
            self._drain()
            self._rows.clear()
            self._relay[:] = POISON
        return {"executor": "hash_lm", "plans_run": self.plans_run}

    def close(self) -> None:
        self._queue.clear()

    def poison(self, pages: Iterable[int]) -> None:
        """These pages were freed: after the plans already submitted, their content is gone."""
        self._queue.append(tuple(int(p) for p in pages))
        if not self._late:
            self._drain()

    def fail(self, rid: str) -> None:
        self._failing.add(rid)

    def _drain(self) -> None:
        while self._queue:
            self._run_next()

    def _run_next(self) -> None:
        item = self._queue.popleft()
        if isinstance(item, StepPlan):
            self._done.append(self._forward(item))
            return
        for page in item:
            lo = page * self._capacity.page_size
            self._slot_position[lo : lo + self._capacity.page_size] = POISON

    def _forward(self, plan: StepPlan) -> StepResult:
        self._check_shape(plan)
        for delta in plan.page_deltas:
            self._table[delta.pool_row, delta.start_page : delta.start_page + len(delta.pages)] = delta.pages
        for init in plan.row_inits:
            self._rows[init.pool_row] = _Row(init, [int(t) for t in init.prompt_ids] + [int(t) for t in init.output_ids])
            self._relay[init.pool_row] = POISON
        rows: list[RowResult] = []
        offset = 0
        for b in range(plan.num_rows):
            n = int(plan.extend_lens[b])
            rows.append(self._forward_row(plan, b, slice(offset, offset + n)))
            offset += n
        self.plans_run += 1
        return StepResult(plan.step, tuple(rows))

    def _check_shape(self, plan: StepPlan) -> None:
        cap = self._capacity
        assert 0 < plan.num_tokens <= cap.max_step_tokens, f"plan {plan.step}: {plan.num_tokens} tokens, limit {cap.max_step_tokens}"
        assert int(plan.extend_lens.sum()) == plan.num_tokens == len(plan.positions) == len(plan.out_cache_loc)
        assert len(set(plan.pool_rows.tolist())) == plan.num_rows, f"plan {plan.step}: a pool row twice"
        assert 0 < int(plan.pool_rows.min()) <= int(plan.pool_rows.max()) <= cap.max_rows
        assert len(set(plan.out_cache_loc.tolist())) == plan.num_tokens, f"plan {plan.step}: a slot twice"
        assert int(plan.out_cache_loc.min()) >= cap.page_size, f"plan {plan.step}: writes the padding page"
        assert int(plan.seq_lens.max()) <= cap.max_context_len

    def _slots(self, pool_row: int, start: int, stop: int) -> IntArray:
        positions = np.arange(start, stop, dtype=np.int32)
        p = self._capacity.page_size
        slots: IntArray = self._table[pool_row, positions // p] * np.int32(p) + positions % p
        return slots

    def _forward_row(self, plan: StepPlan, b: int, span: slice) -> RowResult:
        pool_row, start, stop = int(plan.pool_rows[b]), int(plan.prefix_lens[b]), int(plan.seq_lens[b])
        row = self._rows.get(pool_row)
        assert row is not None, f"plan {plan.step}: row {pool_row} was never initialised"
        assert row.init.rid == plan.rids[b], f"plan {plan.step}: row {pool_row} belongs to {row.init.rid}, plan says {plan.rids[b]}"
        inputs = [int(self._relay[pool_row]) if t == RELAY else int(t) for t in plan.input_ids[span]]
        assert inputs == row.history[start:stop], f"plan {plan.step}: inputs of {plan.rids[b]} [{start}, {stop}) differ from its history"
        assert plan.positions[span].tolist() == list(range(start, stop)), f"plan {plan.step}: positions of {plan.rids[b]}"
        while len(row.chain) <= stop:
            i = len(row.chain) - 1
            row.chain.append(self.model.extend(row.chain[i], i, row.history[i]))
        self._check_prefix(plan, b, row, start)
        own = self._slots(pool_row, start, stop)
        assert np.array_equal(own, plan.out_cache_loc[span]), f"plan {plan.step}: out_cache_loc of {plan.rids[b]} is not what the page table says"
        self._slot_position[own] = np.arange(start, stop)
        self._slot_token[own] = inputs
        self._slot_hash[own] = np.array(row.chain[start + 1 : stop + 1], dtype=np.uint64)
        return self._result(plan, b, row, start, stop)

    def _check_prefix(self, plan: StepPlan, b: int, row: _Row, start: int) -> None:
        slots = self._slots(int(plan.pool_rows[b]), 0, start)
        where = f"plan {plan.step}: {plan.rids[b]} (row {plan.pool_rows[b]})"
        positions = self._slot_position[slots]
        assert np.array_equal(positions, np.arange(start)), f"{where}: slots hold positions {positions.tolist()}, expected 0..{start - 1}"
        assert self._slot_token[slots].tolist() == row.history[:start], f"{where}: slots hold other tokens than its prefix"
        assert np.array_equal(self._slot_hash[slots], np.array(row.chain[1 : start + 1], dtype=np.uint64)), f"{where}: slots of another prefix"

    def _result(self, plan: StepPlan, b: int, row: _Row, start: int, stop: int) -> RowResult:
        init = row.init
        if init.rid in self._failing:
            self._failing.discard(init.rid)
            if plan.sample[b]:
                row.history.append(0)
                self._relay[init.pool_row] = 0
            return RowResult(error="the step failed for this row (asked for by a test)")
        prompt_logprobs = self._prompt_logprobs(row, start, stop)
        if not plan.sample[b]:
            return RowResult(prompt_logprobs=prompt_logprobs)
        assert len(row.history) == stop, f"plan {plan.step}: {init.rid} samples at {stop}, its history has {len(row.history)} tokens"
        logits = self.model.logits(row.chain[stop])
        token = draw(self.model, logits, init.params, history=row.history, prompt_len=len(init.prompt_ids), stop_ids=init.stop_ids)
        row.history.append(token)
        self._relay[init.pool_row] = token
        logprobs = () if init.logprobs is None else (self.model.logprob(logits, token, init.logprobs),)
        return RowResult((token,), logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: _Row, start: int, stop: int) -> tuple[TokenLogprob, ...]:
        spec = row.init.logprobs
        if spec is None or spec.prompt_start is None:
            return ()
        last = min(stop, len(row.init.prompt_ids) - 1)
        wanted = range(max(start + 1, spec.prompt_start), last + 1)
        return tuple(self.model.logprob(self.model.logits(row.chain[p]), row.history[p], spec) for p in wanted)
