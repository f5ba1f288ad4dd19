"""`ScheduleBatch`: the rows of the next step, frozen into a `StepPlan`. Updates the counts of its requests; takes the pages of decode rows.

Rows: extend rows first, then decode rows. The value of a token that is still in flight is RELAY; only lengths are known (architecture D2).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rootlet.core.step import RELAY, IntArray, RowInit, StepPlan
from rootlet.core.types import ForwardMode, LogprobSpec, Phase
from rootlet.scheduler.decode_run import DecodeRun
from rootlet.scheduler.plan_memory import memory_of_plan
from rootlet.scheduler.prefill_adder import Admitted
from rootlet.scheduler.req import Req
from rootlet.scheduler.state import LaunchedRow, LaunchedStep, SchedulerState, note

_NONE = np.empty(0, dtype=np.int32)


class ScheduleBatch:
    """Filled by `prepare_for_extend` and `prepare_for_decode`, in that order; `freeze` ends it."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._rows: list[LaunchedRow] = []
        self._inits: list[RowInit] = []
        self._ids: list[IntArray] = []
        self._positions: IntArray = _NONE
        self._run: DecodeRun | None = None
        self._num_extend = 0

    def prepare_for_extend(self, chunks: Sequence[Admitted]) -> None:
        """One row for each chunk; a request enters DECODE when its last chunk is planned."""
        for chunk in chunks:
            req = chunk.req
            if chunk.is_first:
                self._inits.append(row_init(req))
            sample = chunk.is_last and req.spec.max_new > 0
            self._rows.append(LaunchedRow(req, req.epoch, chunk.start, chunk.stop, is_extend=True, sample=sample))
            self._ids.append(req.ids(chunk.start, chunk.stop))
            req.planned = req.kv.kv_committed_len = chunk.stop
            req.pending_chunks += 1
            self._state.counters.prefilled_tokens += chunk.stop - chunk.start
            req.pending += int(sample)
            req.times.num_chunks += 1
            if not (chunk.is_first and chunk.is_last):
                note(
                    self._state, req, "chunk", number=req.times.num_chunks, start=chunk.start, stop=chunk.stop, of=req.fill_len, step=self._state.step
                )
            if chunk.is_last:
                self._state.queues.move(req, Phase.DECODE)
        self._num_extend = len(self._rows)

    def prepare_for_decode(self, reqs: Sequence[Req]) -> None:
        """One token for each; pages were ensured by the caller."""
        if not reqs:
            return
        state, launched = self._state, self._rows
        ids, positions = [], []
        for req in reqs:
            state.kv.grow(req)
            start = req.planned
            ids.append(req.outputs[-1] if req.pending == 0 else RELAY)
            positions.append(start)
            launched.append(LaunchedRow(req, req.epoch, start, start + 1, is_extend=False, sample=True))
            req.planned = req.kv.kv_committed_len = start + 1
            req.pending += 1
        run = state.decode_run
        if run is None or not run.covers(reqs):
            run = state.decode_run = DecodeRun(reqs)
        self._run = run
        self._ids.append(np.array(ids, dtype=np.int32))
        self._positions = np.array(positions, dtype=np.int32)

    def freeze(self) -> StepPlan:
        """The plan; also noted as launched. The caller must submit it."""
        plan = self._decode_plan(self._run) if self._run is not None and not self._num_extend else self._mixed_plan()
        state = self._state
        for row in self._rows[: self._num_extend]:
            state.kv.snapshot(row.req)
        state.step += 1
        state.in_flight.append(LaunchedStep(plan, tuple(self._rows)))
        state.plan_log.append(plan)
        return plan

    def _decode_plan(self, run: DecodeRun) -> StepPlan:
        step, cache = self._state.step, self._state.kv.cache
        slots = run.slots(cache, self._positions, step)
        memory = memory_of_plan(cache, [r.req for r in self._rows], token_rows=run.pool_rows, positions=self._positions, slots=slots)
        return StepPlan(
            step=step,
            mode=self._mode(),
            rids=run.rids,
            epochs=run.epochs,
            pool_rows=run.pool_rows,
            prefix_lens=self._positions,
            extend_lens=run.ones,
            sample=run.all_drawn,
            input_ids=self._ids[0],
            positions=self._positions,
            out_cache_loc=memory.out_cache_loc,
            page_deltas=memory.page_deltas,
            window_deltas=memory.window_deltas,
            out_window_loc=memory.out_window_loc,
            state_ops=memory.state_ops,
            state_slots=memory.state_slots,
        )

    def _mixed_plan(self) -> StepPlan:
        state, rows = self._state, self._rows
        lens = np.array([r.stop - r.start for r in rows], dtype=np.int32)
        pool_rows = np.array([r.req.kv.row for r in rows], dtype=np.int32)
        positions = np.concatenate([np.arange(r.start, r.stop, dtype=np.int32) for r in rows])
        memory = memory_of_plan(state.kv.cache, [r.req for r in rows], token_rows=np.repeat(pool_rows, lens), positions=positions)
        return StepPlan(
            step=state.step,
            mode=self._mode(),
            rids=tuple(r.req.rid for r in rows),
            epochs=np.array([r.epoch for r in rows], dtype=np.int32),
            pool_rows=pool_rows,
            prefix_lens=np.array([r.start for r in rows], dtype=np.int32),
            extend_lens=lens,
            sample=np.array([r.sample for r in rows], dtype=np.bool_),
            input_ids=np.concatenate(self._ids),
            positions=positions,
            out_cache_loc=memory.out_cache_loc,
            page_deltas=memory.page_deltas,
            row_inits=tuple(self._inits),
            window_deltas=memory.window_deltas,
            out_window_loc=memory.out_window_loc,
            state_ops=memory.state_ops,
            state_slots=memory.state_slots,
        )

    def _mode(self) -> ForwardMode:
        counters = self._state.counters
        if self._num_extend == 0:
            counters.decode_steps += 1
            return ForwardMode.DECODE
        if self._num_extend == len(self._rows):
            counters.prefill_steps += 1
            return ForwardMode.EXTEND
        counters.mixed_steps += 1
        return ForwardMode.MIXED


def row_init(req: Req) -> RowInit:
    """Sampling state of a row that is built now: outputs known so far seed the penalties and number the next draw."""
    return RowInit(
        pool_row=req.kv.row or 0,
        rid=req.rid,
        params=req.spec.params,
        stop_ids=req.spec.stop_ids,
        prompt_ids=req.ids(0, req.prompt_len),
        output_ids=req.ids(req.prompt_len, req.num_tokens),
        logprobs=_logprobs_still_wanted(req),
    )


def _logprobs_still_wanted(req: Req) -> LogprobSpec | None:
    """After a retraction, prompt logprobs that are known already are not computed again."""
    spec = req.spec.logprobs
    if spec is not None and spec.prompt_start is not None and req.prompt_logprobs_complete():
        return msgspec.structs.replace(spec, prompt_start=None)
    return spec
