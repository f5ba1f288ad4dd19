"""HashLM: an executor without a model, whose every wrong page, row, position or reuse becomes an assertion or another token.

The content of a KV slot is (position, token, hash of the prefix up to and including that token). A forward walks each row's page table, which it
builds from the deltas of the plans alone, and asserts that the slots spell the row's prefix; then it writes its own slots. Logits are a function
of the prefix hash, so the next token is a function of (prefix, sampling parameters, seed, choice, output number): `reference_generate` computes
the same tokens without any scheduler. Used by tests, the simulator's checks and `bench` of the control wing. Does not model time.

Where the capacity says so it has the memories of hybrid models too. With `window_len` a second pool of such slots is read, through the second
table alone, over the keys that the first query of a row sees. With `num_states` the hash that makes the logits is not known from the row's
history: it lives in the row's state slot, each forward carries it on, and the ops of a plan copy and clear it; so a snapshot of the wrong
position, a copy that is missed or a slot with two owners gives another token.

What was freed is poisoned in order with the plans, and a relayed token once it was read.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rootlet.core.hash_definition import ROOT, HashModel, Reference, draw, reference_generate
from rootlet.core.step import RELAY, Capacity, ControlOp, IntArray, PageDelta, RowInit, RowResult, StepPlan, StepResult
from rootlet.core.types import TokenLogprob

__all__ = ["MODES", "HashLM", "HashModel", "Mode", "Reference", "reference_generate"]

POISON = -7

Mode = Literal["eager", "late", "early-publish", "random"]
MODES: tuple[Mode, ...] = ("eager", "late", "early-publish", "random")


@dataclass(slots=True)
class _Row:
    """What the executor keeps of a pool row between steps: the history it was given and drew, and its hash chain (chain[i] = prefix of i tokens)."""

    init: RowInit
    history: list[int]
    chain: list[int] = field(default_factory=lambda: [ROOT])


@dataclass(frozen=True, slots=True)
class _Freed:
    """An entry of the queue: what the plans before it may read and those after it may not."""

    pages: tuple[int, ...] = ()
    window_pages: tuple[int, ...] = ()
    states: tuple[int, ...] = ()


class _Pool:
    """Slots of one pool and the page table over them."""

    def __init__(self, num_pages: int, capacity: Capacity) -> None:
        self._page_size = capacity.page_size
        slots = (num_pages + 1) * capacity.page_size
        self._position = np.full(slots, POISON, dtype=np.int64)
        self._token = np.full(slots, POISON, dtype=np.int64)
        self._hash = np.zeros(slots, dtype=np.uint64)
        self._table = np.zeros((capacity.max_rows + 1, capacity.max_pages_per_row), dtype=np.int32)

    def apply(self, deltas: Iterable[PageDelta]) -> None:
        for delta in deltas:
            self._table[delta.pool_row, delta.start_page : delta.start_page + len(delta.pages)] = delta.pages

    def slots(self, pool_row: int, start: int, stop: int) -> IntArray:
        positions = np.arange(start, stop, dtype=np.int32)
        p = self._page_size
        slots: IntArray = self._table[pool_row, positions // p] * np.int32(p) + positions % p
        return slots

    def write(self, slots: IntArray, start: int, row: _Row) -> None:
        """The content of positions [start, start + len(slots)) of `row`."""
        stop = start + len(slots)
        self._position[slots] = np.arange(start, stop)
        self._token[slots] = row.history[start:stop]
        self._hash[slots] = np.array(row.chain[start + 1 : stop + 1], dtype=np.uint64)

    def check(self, where: str, pool_row: int, row: _Row, span: range) -> None:
        """Positions `span` of the row hold its own content."""
        slots = self.slots(pool_row, span.start, span.stop)
        positions = self._position[slots]
        assert np.array_equal(positions, np.array(span)), (
            f"{where}: slots hold positions {positions.tolist()}, expected {span.start}..{span.stop - 1}"
        )
        assert self._token[slots].tolist() == row.history[span.start : span.stop], f"{where}: slots hold other tokens than its prefix"
        want = np.array(row.chain[span.start + 1 : span.stop + 1], dtype=np.uint64)
        assert np.array_equal(self._hash[slots], want), f"{where}: slots of another prefix"

    def poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._position[page * self._page_size : (page + 1) * self._page_size] = POISON


class HashLM:
    """`Executor` over `HashModel`. `mode`: when a plan runs, always in order.

    eager          at submit
    late           at collect: the worst case for what is reused too early
    early-publish  at submit, but what it writes lands only when the next plan starts: a result is known before its KV is there
    random         at submit or later, by a seeded coin

    `poison` marks what was freed, in order with the plans. `fail(rid)` makes the next sampled or chunk row of that request fail alone.
    Raises AssertionError whenever a plan names a slot whose content is not the row's prefix.
    """

    def __init__(self, capacity: Capacity, *, model: HashModel | None = None, mode: Mode = "eager", seed: int = 0) -> None:
        self.model = model or HashModel(vocab_size=capacity.vocab_size)
        self.plans_run = 0
        self._capacity = capacity
        self._mode = mode
        self._coin = random.Random(seed)
        self._full = _Pool(capacity.num_pages, capacity)
        self._window = _Pool(capacity.num_window_pages, capacity) if capacity.window_len else None
        self._states = [ROOT] + [POISON] * capacity.num_states
        self._freed_states: set[int] = set()
        self._rows: dict[int, _Row] = {}
        self._relay = np.full(capacity.max_rows + 1, POISON, dtype=np.int64)
        self._queue: deque[StepPlan | _Freed] = deque()
        self._done: deque[StepResult] = deque()
        self._unwritten: list[tuple[_Pool, IntArray, int, _Row]] = []
        self._unwritten_states: list[tuple[int, int]] = []
        self._failing: set[str] = set()

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> None:
        self._enqueue(plan)

    def _enqueue(self, item: StepPlan | _Freed) -> None:
        self._queue.append(item)
        if self._mode in ("eager", "early-publish") or (self._mode == "random" and self._coin.random() < 0.5):
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

    def poison(self, pages: Iterable[int], window_pages: Iterable[int] = (), states: Iterable[int] = ()) -> None:
        """These were freed: after the plans already submitted, their content is gone. A freed state may still be the source of an op of the next
        plan, so it goes after those ops, unless one of them gives it to somebody else."""
        self._enqueue(_Freed(tuple(pages), tuple(window_pages), tuple(states)))

    def fail(self, rid: str) -> None:
        self._failing.add(rid)

    def _drain(self) -> None:
        while self._queue:
            self._run_next()

    def _run_next(self) -> None:
        self._land()
        item = self._queue.popleft()
        if isinstance(item, StepPlan):
            self._done.append(self._forward(item))
            if self._mode != "early-publish":
                self._land()
            return
        self._full.poison(item.pages)
        if self._window is not None:
            self._window.poison(item.window_pages)
        self._freed_states.update(item.states)

    def _land(self) -> None:
        """What was computed is written."""
        for pool, slots, start, row in self._unwritten:
            pool.write(slots, start, row)
        for slot, prefix in self._unwritten_states:
            self._states[slot] = prefix
        self._unwritten.clear()
        self._unwritten_states.clear()

    def _forward(self, plan: StepPlan) -> StepResult:
        self._check_shape(plan)
        self._full.apply(plan.page_deltas)
        if self._window is not None:
            self._window.apply(plan.window_deltas)
        for op in plan.state_ops:
            self._states[op.dst] = self._states[op.src]
        for slot in self._freed_states.difference(op.dst for op in plan.state_ops):
            self._states[slot] = POISON
        self._freed_states.clear()
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
        for loc in (plan.out_cache_loc, *(() if plan.out_window_loc is None else (plan.out_window_loc,))):
            assert len(set(loc.tolist())) == plan.num_tokens, f"plan {plan.step}: a slot twice"
            assert int(loc.min()) >= cap.page_size, f"plan {plan.step}: writes the padding page"
        assert int(plan.seq_lens.max()) <= cap.max_context_len
        assert (plan.out_window_loc is not None) == (cap.window_len > 0), f"plan {plan.step}: window slots without a window pool, or none with one"
        assert (plan.state_slots is not None) == (cap.num_states > 0), f"plan {plan.step}: state slots without states, or none with them"
        if plan.state_slots is not None:
            assert len(set(plan.state_slots.tolist()) - {0}) == plan.num_rows, f"plan {plan.step}: state slots {plan.state_slots.tolist()}"

    def _forward_row(self, plan: StepPlan, b: int, span: slice) -> RowResult:
        pool_row, start, stop = int(plan.pool_rows[b]), int(plan.prefix_lens[b]), int(plan.seq_lens[b])
        row = self._rows.get(pool_row)
        assert row is not None, f"plan {plan.step}: row {pool_row} was never initialised"
        assert row.init.rid == plan.rids[b], f"plan {plan.step}: row {pool_row} belongs to {row.init.rid}, plan says {plan.rids[b]}"
        inputs = [self._take_relayed(pool_row) if t == RELAY else int(t) for t in plan.input_ids[span]]
        assert inputs == row.history[start:stop], f"plan {plan.step}: inputs of {plan.rids[b]} [{start}, {stop}) differ from its history"
        assert plan.positions[span].tolist() == list(range(start, stop)), f"plan {plan.step}: positions of {plan.rids[b]}"
        while len(row.chain) <= stop:
            i = len(row.chain) - 1
            row.chain.append(self.model.extend(row.chain[i], i, row.history[i]))
        where = f"plan {plan.step}: {plan.rids[b]} (row {pool_row})"
        self._full.check(where, pool_row, row, range(start))
        self._write(where, self._full, pool_row, row, out_loc=plan.out_cache_loc[span], start=start)
        if self._window is not None and plan.out_window_loc is not None:
            self._window.check(f"{where}, window", pool_row, row, range(max(0, start + 1 - self._capacity.window_len), start))
            self._write(f"{where}, window", self._window, pool_row, row, out_loc=plan.out_window_loc[span], start=start)
        return self._result(plan, b, row, self._prefixes(plan, b, row))

    def _take_relayed(self, pool_row: int) -> int:
        token, self._relay[pool_row] = int(self._relay[pool_row]), POISON
        return token

    def _write(self, where: str, pool: _Pool, pool_row: int, row: _Row, *, out_loc: IntArray, start: int) -> None:
        own = pool.slots(pool_row, start, start + len(out_loc))
        assert np.array_equal(own, out_loc), f"{where}: the slots to write are not what the page table says"
        self._unwritten.append((pool, own, start, row))

    def _prefixes(self, plan: StepPlan, b: int, row: _Row) -> Sequence[int]:
        """Hashes of the row's prefixes of prefix_lens[b]..seq_lens[b] tokens: known from its history, or carried on from its state."""
        start, stop = int(plan.prefix_lens[b]), int(plan.seq_lens[b])
        if plan.state_slots is None:
            return row.chain[start : stop + 1]
        slot = int(plan.state_slots[b])
        prefixes = [self._states[slot]]
        for position in range(start, stop):
            prefixes.append(self.model.extend(prefixes[-1], position, row.history[position]))
        self._unwritten_states.append((slot, prefixes[-1]))
        return prefixes

    def _result(self, plan: StepPlan, b: int, row: _Row, prefixes: Sequence[int]) -> RowResult:
        """`prefixes[i]` = hash of the row's prefix of start + i tokens, for the positions of this step."""
        init, start, stop = row.init, int(plan.prefix_lens[b]), int(plan.seq_lens[b])
        if init.rid in self._failing:
            self._failing.discard(init.rid)
            if plan.sample[b]:
                row.history.append(0)
                self._relay[init.pool_row] = 0
            return RowResult(error="the step failed for this row (asked for by a test)")
        prompt_logprobs = self._prompt_logprobs(row, prefixes, start, stop)
        if not plan.sample[b]:
            return RowResult(prompt_logprobs=prompt_logprobs)
        assert len(row.history) == stop, f"plan {plan.step}: {init.rid} samples at {stop}, its history has {len(row.history)} tokens"
        logits = self.model.logits(prefixes[stop - start])
        token = draw(self.model, logits, init.params, history=row.history, prompt_len=len(init.prompt_ids), stop_ids=init.stop_ids)
        row.history.append(token)
        self._relay[init.pool_row] = token
        logprobs = () if init.logprobs is None else (self.model.logprob(logits, token, init.logprobs),)
        return RowResult((token,), logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: _Row, prefixes: Sequence[int], start: int, stop: int) -> tuple[TokenLogprob, ...]:
        spec = row.init.logprobs
        if spec is None or spec.prompt_start is None:
            return ()
        last = min(stop, len(row.init.prompt_ids) - 1)
        wanted = range(max(start + 1, spec.prompt_start), last + 1)
        return tuple(self.model.logprob(self.model.logits(prefixes[p - start]), row.history[p], spec) for p in wanted)
