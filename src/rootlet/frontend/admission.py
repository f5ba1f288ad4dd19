"""What the front refuses, and what it fills in, before a request costs anything: pure functions from request and capacity to the wire form.

One rule for every dialect: a prompt must leave room for one token (`prompt_len < context`), else `ContextOverflow`; `max_new_tokens` is clamped
to what the context leaves, and such a request ends with `length`. A prompt that the KV pool can never hold is `PoolOverflow`, at the door.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from rootlet.core.errors import ContextOverflow, InvalidValue, PoolOverflow, RootletError, Unsupported, error_of
from rootlet.core.ids import MAX_WIRE_RID_CHARS
from rootlet.core.sampling_params import SamplingParams, validate
from rootlet.core.types import FinishKind, LogprobSpec
from rootlet.frontend.detokenize import TokenBytes
from rootlet.frontend.req_state import ReqState
from rootlet.frontend.types import GenerateReq
from rootlet.ipc.messages import DetokSpec, SchedulerReady, TokenizedGenerateReqInput

MAX_PRIORITY = 2**31


class SizedTokenizer(Protocol):
    def min_tokens(self, text: str) -> int: ...


def check_text(param: str, text: str, tokenizer: SizedTokenizer, ready: SchedulerReady) -> None:
    """Refuses a text that is too long however it is split, before anyone spends seconds on splitting it. Raises `ContextOverflow`, `PoolOverflow`."""
    check_prompt_len(param, tokenizer.min_tokens(text), ready, at_least=True)


def check_prompt_len(param: str, prompt_len: int, ready: SchedulerReady, *, at_least: bool = False) -> None:
    """The one length rule. `at_least`: `prompt_len` is a lower bound. Raises `ContextOverflow`, `PoolOverflow`."""
    if prompt_len >= ready.max_context_len:
        raise ContextOverflow(param, prompt_len=prompt_len, ctx_len=ready.max_context_len, at_least=at_least)
    if prompt_len > ready.max_prompt_len:
        raise PoolOverflow(param, prompt_len=prompt_len, pool_len=ready.max_prompt_len, at_least=at_least)


def check_prompt(req: GenerateReq, input_ids: Sequence[int], ready: SchedulerReady) -> None:
    """Length and range of the prompt. Raises `InvalidValue`, `ContextOverflow`, `PoolOverflow`; O(prompt)."""
    prompt_len = len(input_ids)
    if prompt_len == 0:
        raise InvalidValue(req.param, f"{req.param} is empty: at least one token is needed")
    check_prompt_len(req.param, prompt_len, ready)
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= ready.vocab_size:
        bad = low if low < 0 else high
        raise InvalidValue(req.param, f"{req.param} holds token id {bad}, outside the vocabulary of {ready.vocab_size} (0..{ready.vocab_size - 1})")
    start = req.logprobs.prompt_start if req.logprobs is not None else None
    if start is not None and start > prompt_len:
        raise InvalidValue("logprob_start_len", f"the first prompt position must be in [0, {prompt_len}], got {start}")


def max_open(ready: SchedulerReady, max_queue: int) -> int:
    """Most choices that may run and wait at once: a row each, and the places of the queue. The scheduler counts the same way."""
    return ready.max_rows + max_queue


def check_request(req: GenerateReq, ready: SchedulerReady, *, max_n: int, max_queue: int, max_logprobs: int) -> None:
    """Everything but the prompt's length, so that a bad value is refused before tokenizing. Raises `InvalidValue`, `Unsupported` for adapters."""
    if (req.prompt is None) == (req.input_ids is None):
        raise InvalidValue(req.param, f"exactly one of text and token ids must be given as {req.param}")
    if req.rid is not None and not (0 < len(req.rid) <= MAX_WIRE_RID_CHARS and req.rid.isprintable()):
        raise InvalidValue("rid", f"rid must be 1 to {MAX_WIRE_RID_CHARS} printable characters")
    if req.lora_id:
        raise Unsupported("LoRA adapters are not supported by this server", param="lora_path")
    if any(not stop for stop in req.sampling.stop):
        raise InvalidValue("stop", "a stop string must not be empty")
    _check_wire(req)
    if req.deadline_s is not None and not req.deadline_s > 0:
        raise InvalidValue("deadline_s", f"deadline_s must be above 0 seconds, got {req.deadline_s}")
    validate(req.sampling, ready.vocab_size, max_n=max_n)
    most = max_open(ready, max_queue)
    if req.sampling.n > most:
        why = f"more choices than may run and wait at once on this server, {most}"
        raise InvalidValue("n", f"n is {req.sampling.n}, {why} (limits: --max-running, --max-queue)")
    if req.logprobs is not None:
        _check_logprobs(req.logprobs, ready.vocab_size, max_logprobs)


def _check_wire(req: GenerateReq) -> None:
    """What the wire cannot carry: text that is not UTF-8 (lone surrogates), integers beyond 64 bits."""
    named = {"user": req.user, "cache_salt": req.cache_salt, "extra_key": req.extra_key, "lora_id": req.lora_id, "routing_key": req.routing_key}
    for name, text in [*named.items(), *(("stop", stop) for stop in req.sampling.stop)]:
        if text is not None and not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidValue(name, f"{name} holds a lone surrogate, which is no valid text")
    if req.priority is not None and not -MAX_PRIORITY <= req.priority < MAX_PRIORITY:
        raise InvalidValue("priority", f"priority must fit in 32 bits, got {req.priority}")


def _check_logprobs(spec: LogprobSpec, vocab_size: int, max_logprobs: int) -> None:
    if not 0 <= spec.top_n <= max_logprobs:
        raise InvalidValue("top_logprobs", f"top_logprobs must be in [0, {max_logprobs}], got {spec.top_n} (limit: --max-logprobs)")
    if spec.prompt_start is not None and spec.prompt_start < 0:
        raise InvalidValue("logprob_start_len", f"the first prompt position must be at least 0, got {spec.prompt_start}")
    for i in spec.token_ids:
        if not 0 <= i < vocab_size:
            raise InvalidValue("token_ids_logprob", f"token id {i} is outside the vocabulary of {vocab_size} (0..{vocab_size - 1})")


def clamp_output(p: SamplingParams, prompt_len: int, ready: SchedulerReady) -> SamplingParams:
    """`max_new_tokens` made a number that fits the context; `min_new_tokens` never above it; `top_k` never above the vocabulary."""
    room = ready.max_context_len - prompt_len
    max_new = room if p.max_new_tokens is None else min(p.max_new_tokens, room)
    return msgspec.structs.replace(p, max_new_tokens=max_new, min_new_tokens=min(p.min_new_tokens, max_new), top_k=min(p.top_k, ready.vocab_size))


def left_neighbour(tokens: TokenBytes, input_ids: Sequence[int], *, skip_special_tokens: bool) -> bytes:
    """The last prompt token with visible text, as int32 bytes: all that a context-dependent tokenizer needs to know of the prompt."""
    if not tokens.left_context_dependent:
        return b""
    for i in reversed(input_ids):
        if 0 <= i < tokens.vocab_size and not (skip_special_tokens and tokens.is_special(i)):
            return np.asarray([i], dtype="<i4").tobytes()
    return b""


def wire_requests(
    req: GenerateReq, input_ids: Sequence[int], *, wire_rids: Sequence[str], seed: int, prompt_tail: bytes, ready: SchedulerReady
) -> list[TokenizedGenerateReqInput]:
    """One message a choice, the parent first: the others wait for its prefill (n > 1 shares one)."""
    params = clamp_output(req.sampling, len(input_ids), ready)
    packed = np.asarray(input_ids, dtype="<i4").tobytes()
    detok = DetokSpec(
        stop=params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
        prompt_tail=prompt_tail,
        min_new_tokens=params.min_new_tokens,
    )
    first = params.choice_index
    return [
        TokenizedGenerateReqInput(
            rid=wire_rid,
            input_ids=packed,
            sampling=msgspec.structs.replace(params, seed=seed, n=1, choice_index=first + index),
            detok=detok,
            logprobs=req.logprobs if index == 0 or req.logprobs is None else msgspec.structs.replace(req.logprobs, prompt_start=None),
            stream=req.stream,
            lora_id=req.lora_id,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            priority=req.priority,
            parent_rid=wire_rids[0] if index else None,
            deadline_s=req.deadline_s,
            user=req.user,
            routing_key=req.routing_key,
        )
        for index, wire_rid in enumerate(wire_rids)
    ]


def refusal_of(state: ReqState, *, param: str, retry_after_s: float) -> RootletError | None:
    """The exception for a choice that failed before it gave anything out, or None."""
    for choice in state.choices:
        if choice.finish is not None and choice.finish.kind is FinishKind.ERROR and not choice.token_ids:
            return error_of(choice.finish, param=param, retry_after_s=retry_after_s)
    return None
