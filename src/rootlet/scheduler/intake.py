"""From a message to a `Req`, or to the error that ends it at once. Second line behind the frontend, which checks the same limits first.

What passes here can always run to its end: `max_new` is clamped by the function that admission uses (budget.py).
"""

from __future__ import annotations

import msgspec
import numpy as np

from rootlet.core.errors import ContextOverflow, InvalidValue, PoolOverflow, QueueFull, RootletError
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Finish, FinishKind, Namespace
from rootlet.ipc.messages import TokenizedGenerateReqInput
from rootlet.scheduler.req import Req, ReqSpec, ReqTimes
from rootlet.scheduler.state import SchedulerState


def finish_of(error: RootletError) -> Finish:
    return Finish(FinishKind.ERROR, status=error.status, code=error.code, message=error.message)


def make_req(state: SchedulerState, msg: TokenizedGenerateReqInput) -> Req:
    """A complete `Req`, phase WAITING, in no queue yet. Raises `InvalidValue` and its kin."""
    prompt_len = _check_prompt(state, msg)
    max_new = state.limits.clamp_max_new(prompt_len, msg.sampling.max_new_tokens)
    params = msgspec.structs.replace(msg.sampling, max_new_tokens=max_new, min_new_tokens=min(msg.sampling.min_new_tokens, max_new))
    stop_ids = tuple(dict.fromkeys(state.eos_token_ids + params.stop_token_ids))
    _check_drawable(params, stop_ids, state.vocab_size)
    spec = ReqSpec(
        rid=msg.rid,
        seq=state.next_seq,
        namespace=Namespace(msg.lora_id or None, msg.extra_key or None, msg.cache_salt or None),
        params=params,
        max_new=max_new,
        stop_ids=stop_ids,
        end_ids=frozenset(params.stop_token_ids if params.ignore_eos else stop_ids),
        detok=msg.detok,
        logprobs=msg.logprobs,
        stream=msg.stream,
        priority=msg.priority or 0,
        parent_rid=msg.parent_rid,
        routing_key=msg.routing_key or None,
    )
    state.next_seq += 1
    times = ReqTimes(arrival_s=state.clock.now(), prefilled_at_arrival=state.counters.prefilled_tokens)
    req = Req(spec=spec, tokens=bytearray(msg.input_ids), prompt_len=prompt_len, times=times, tenant=state.tenants.enter(msg.user or None))
    facts = {"rid": msg.rid, "prompt_len": prompt_len, "max_new": max_new, "priority": spec.priority, "user": req.tenant.name}
    req.timeline.facts = facts
    return req


def _check_drawable(params: SamplingParams, stop_ids: tuple[int, ...], vocab_size: int) -> None:
    """Until min_tokens are there, what would end the request is masked: something must be left. Raises `InvalidValue`."""
    if params.min_new_tokens == 0:
        return
    allowed = params.allowed_token_ids
    is_empty = len(stop_ids) >= vocab_size if allowed is None else set(allowed) <= set(stop_ids)
    if is_empty:
        what = "the vocabulary" if allowed is None else "allowed_token_ids"
        raise InvalidValue("min_tokens", f"min_tokens is {params.min_new_tokens}, but every token of {what} ends the request")


def check_queue(state: SchedulerState, max_queue: int) -> None:
    """As many may be open as there are rows and places to wait, whether they came one by one or all in one turn, before the first of them could
    take a row: the frontend counts the same way. Raises `QueueFull`."""
    num_open, max_rows = len(state.queues), state.limits.max_rows
    if num_open >= max_rows + max_queue:
        raise QueueFull(
            f"the queue is full: {num_open} requests are running or waiting, --max-running is {max_rows} and --max-queue {max_queue}; try again",
            retry_after_s=1.0,
        )


def _check_prompt(state: SchedulerState, msg: TokenizedGenerateReqInput) -> int:
    if len(msg.input_ids) % 4:
        raise InvalidValue("input_ids", f"input_ids are {len(msg.input_ids)} bytes, not a whole number of 4-byte token ids")
    prompt_len, limits = len(msg.input_ids) // 4, state.limits
    if prompt_len == 0:
        raise InvalidValue("prompt", "the prompt is empty: at least one token is needed")
    if prompt_len >= limits.max_context_len:
        raise ContextOverflow("prompt", prompt_len=prompt_len, ctx_len=limits.max_context_len)
    if prompt_len > limits.pool_len:
        raise PoolOverflow("prompt", prompt_len=prompt_len, pool_len=limits.pool_len)
    ids = np.frombuffer(msg.input_ids, dtype="<i4")
    if ids.min() < 0 or ids.max() >= state.vocab_size:
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise InvalidValue("input_ids", f"token id {bad} is outside the vocabulary of {state.vocab_size} (0..{state.vocab_size - 1})")
    start = None if msg.logprobs is None else msg.logprobs.prompt_start
    if start is not None and not 0 <= start <= prompt_len:
        raise InvalidValue("logprob_start_len", f"prompt logprobs from position {start}, the prompt has {prompt_len} tokens")
    return prompt_len
