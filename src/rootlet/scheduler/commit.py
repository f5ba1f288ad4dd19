"""Applies a `StepResult` to the requests of the plan that gave it: append, check for the end, publish, stream. Each row exactly once.

A row whose request ended or was retracted since the launch (phase DONE, or another epoch) is counted and dropped: that is overshoot after a stop,
or a token that will be drawn again and be the same (architecture D6). What is published never goes past the token before the last one drawn, so
the cache holds the same with and without overlap.
"""

from __future__ import annotations

from rootlet.core.step import RowResult, StepResult
from rootlet.core.types import Finish, FinishKind, Phase, TokenLogprob
from rootlet.ipc.messages import StopReq
from rootlet.scheduler.policies.fairness import DRAWN_WEIGHT
from rootlet.scheduler.req import Req
from rootlet.scheduler.state import LaunchedRow, SchedulerState, end_req, note


def commit(state: SchedulerState, result: StepResult) -> None:
    """Results come in the order of the plans (I5)."""
    launched = state.in_flight.popleft()
    assert launched.plan.step == result.step, f"I5 result of step {result.step}, expected {launched.plan.step}"
    state.counters.forward_s += result.forward_s
    for row, row_result in zip(launched.rows, result.rows, strict=True):
        if row.req.phase is Phase.DONE or row.req.epoch != row.epoch:
            state.counters.discarded_rows += 1
        else:
            _commit_row(state, row, row_result)


def _commit_row(state: SchedulerState, row: LaunchedRow, result: RowResult) -> None:
    req = row.req
    req.pending_chunks -= int(row.is_extend)
    req.pending -= int(row.sample)
    if result.error is not None:
        end_req(state, req, Finish(FinishKind.ERROR, status=500, code="internal_error", message=f"The request failed in the engine: {result.error}"))
        return
    if row.is_extend:
        _take_prompt_logprobs(req, row, result)
    if not row.sample:
        _commit_chunk(state, row)
        return
    finish = _append_tokens(state, req, result)
    if row.is_extend:
        req.prefill_done = True
    if finish is not None:
        end_req(state, req, finish, publish_len=req.num_tokens - 1)
        return
    if row.is_extend:
        state.kv.checkpoint(req, row.stop)
    state.outbox.stream(req)


def _commit_chunk(state: SchedulerState, row: LaunchedRow) -> None:
    """A chunk without a draw: either more follow, or nothing was to be generated and the prompt is all there is."""
    if row.req.spec.max_new == 0 and row.stop == row.req.fill_len:
        row.req.prefill_done = True
        end_req(state, row.req, Finish(FinishKind.LENGTH), publish_len=row.stop)
    else:
        state.kv.checkpoint(row.req, row.stop)


def _append_tokens(state: SchedulerState, req: Req, result: RowResult) -> Finish | None:
    assert result.tokens, f"step gave no token for {req.rid}"
    times, wants_logprobs = req.times, req.spec.logprobs is not None
    if times.first_token_s is None:
        times.first_token_s = state.clock.now()
        note(state, req, "first token")
    for i, token in enumerate(result.tokens):
        req.append(token)
        state.counters.generated_tokens += 1
        req.tenant.served += DRAWN_WEIGHT
        if wants_logprobs:
            req.out.logprobs.append(result.logprobs[i])
        finish = check_finish(req, token)
        if finish is not None:
            return finish
    return None


def check_finish(req: Req, token: int) -> Finish | None:
    """Stop before length, token by token. A stop id counts only beyond min_new_tokens (the executor masks it before)."""
    spec, num_outputs = req.spec, len(req.outputs)
    assert num_outputs <= spec.max_new, f"I9 {req.rid} has {num_outputs} outputs, max_new is {spec.max_new}"
    if token in spec.end_ids and num_outputs > spec.params.min_new_tokens:
        return Finish(FinishKind.STOP, matched=token)
    if num_outputs >= spec.max_new:
        return Finish(FinishKind.LENGTH)
    return None


def _take_prompt_logprobs(req: Req, row: LaunchedRow, result: RowResult) -> None:
    """Append what is not known yet: a chunk may cover positions again after a retraction."""
    spec = req.spec.logprobs
    if spec is None or spec.prompt_start is None or req.prompt_logprobs_complete():
        return
    known = req.out.prompt_logprobs
    if spec.prompt_start == 0 and not known:
        known.append(TokenLogprob(int(req.ids(0, 1)[0]), None))
    first = max(row.start + 1, spec.prompt_start)
    for position, entry in enumerate(result.prompt_logprobs, start=first):
        if position == spec.prompt_start + len(known) and position < req.prompt_len:
            known.append(entry)


def stop_req(state: SchedulerState, msg: StopReq) -> None:
    """The detokenizer found a stop string: keep only the first tokens; nothing past the stop enters the tree. Unknown rid: it ended already."""
    req = state.queues.by_rid.get(msg.rid)
    if req is None:
        return
    computed_len = req.num_tokens - 1 if req.outputs else 0
    keep_len = min(max(msg.keep_len, 0), len(req.outputs))
    del req.outputs[keep_len:]
    del req.out.logprobs[keep_len:]
    del req.tokens[4 * req.num_tokens :]
    end_req(state, req, Finish(FinishKind.STOP, matched=msg.matched), publish_len=min(computed_len, req.num_tokens, req.planned))
