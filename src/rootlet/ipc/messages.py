"""Every message that crosses a process boundary: plain structs, msgpack on the wire, never pickle. Imports only `core`.

Rule: each `rid` that the frontend sends gets exactly one terminal message (an output whose `finish` is set). rids match exactly, never by
prefix. Token ids travel as little-endian int32 bytes.

    frontend  -> scheduler     TokenizedGenerateReqInput, AbortReq, StopReq, FlushCacheReq, GetStateReq, PauseReq, PinReq, ShutdownReq
    scheduler -> detokenizer   BatchTokenIDOutput
    detokenizer -> frontend    BatchStrOutput
    scheduler -> frontend      SchedulerReady, LoadProgress, FlushCacheReqOutput, GetStateReqOutput, HealthTick, SchedulerError
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Finish, LogprobSpec, TokenLogprob


class DetokSpec(msgspec.Struct, frozen=True):
    """What the detokenizer must know of a request; travels through the scheduler inside the first output, so no second channel can race it.

    `prompt_tail`: last few prompt ids as int32 bytes, for tokenizers whose text depends on the left neighbour.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    prompt_tail: bytes = b""
    min_new_tokens: int = 0


class TokenizedGenerateReqInput(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One request for one choice. `parent_rid` set = a parallel sample: it waits until the parent's prefill is in the tree (n > 1 shares one
    prefill). `deadline_s` = seconds from arrival. `priority`: larger is more important. `user` is the tenant under `vtc`; requests of one
    `routing_key` are kept together under `routing-key`."""

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    detok: DetokSpec
    logprobs: LogprobSpec | None = None
    stream: bool = False
    lora_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    parent_rid: str | None = None
    deadline_s: float | None = None
    user: str | None = None
    routing_key: str | None = None


class AbortReq(msgspec.Struct, frozen=True, tag=True):
    """Abort one rid, or all. An unknown rid is a no-op. `reason` reaches the terminal message (kind ABORT)."""

    rid: str | None = None
    abort_all: bool = False
    reason: str = "aborted by the client"


class StopReq(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer saw a stop string: end this request as finished with only its first `keep_len` output tokens (nothing past the stop may
    enter the tree). The client's terminal message was already sent by the detokenizer; the scheduler's own is dropped there."""

    rid: str
    keep_len: int
    matched: str


class FlushCacheReq(msgspec.Struct, frozen=True, tag=True):
    """Parked until fully idle, at most `timeout_s` (0 = answer at once)."""

    req_id: str
    timeout_s: float = 0.0


class GetStateReq(msgspec.Struct, frozen=True, tag=True):
    """`what`: "info" (config, capacity, counters), "state" (queues, lengths, ledger, ASCII tree), "metrics" (counters, gauges, histograms),
    "request" (one request and what happened to it, by `args["rid"]`; {} when it is not known), "tree" (the prefix cache)."""

    req_id: str
    what: str = "info"
    args: dict[str, Any] = {}


class PauseReq(msgspec.Struct, frozen=True, tag=True):
    """`mode` of a pause: "in_place" (freeze), "retract" (running requests give their KV back and wait), "abort" (every request ends)."""

    req_id: str
    paused: bool
    mode: Literal["in_place", "retract", "abort"] = "in_place"


class PinReq(msgspec.Struct, frozen=True, tag=True):
    """Keep what is cached of the prefix `input_ids` (int32 bytes) for `ttl_s`; give up `pin_id` (None = all); list what is pinned. Answered by a
    `GetStateReqOutput`."""

    req_id: str
    action: Literal["pin", "unpin", "list"]
    input_ids: bytes = b""
    ttl_s: float = 0.0
    pin_id: str | None = None
    lora_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class ShutdownReq(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs (at most `drain_s`), abort the rest, send every terminal message, then end the process with code 0."""

    drain_s: float = 30.0


class ReqStats(msgspec.Struct, frozen=True):
    """Where a request's time went, on its terminal message: seconds, counts, and cached tokens by tier. `wait_reasons` = ticks waited, by reason."""

    queue_s: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    num_chunks: int = 0
    num_retractions: int = 0
    cached_device_len: int = 0
    cached_host_len: int = 0
    cached_storage_len: int = 0
    wait_reasons: dict[str, int] = {}


class TokenIDOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one rid since its last output. `spec` only in the first one. `cached_len` = prompt tokens found in the cache at first
    admission (recomputation after a retraction is not a hit). completion_len counts every drawn token, the stop token included."""

    rid: str
    token_ids: tuple[int, ...] = ()
    spec: DetokSpec | None = None
    finish: Finish | None = None
    prompt_len: int = 0
    completion_len: int = 0
    cached_len: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    stats: ReqStats | None = None


class BatchTokenIDOutput(msgspec.Struct, frozen=True, tag=True):
    outputs: tuple[TokenIDOutput, ...]


class StrOutput(msgspec.Struct, frozen=True, kw_only=True):
    """As `TokenIDOutput`, with text. `text` is the newly released delta (held back: bytes that may still complete a character, and a tail that
    may still become a stop string); tokens and logprobs are held back with their text. `completion_len` counts the tokens handed over."""

    rid: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    prompt_len: int = 0
    completion_len: int = 0
    cached_len: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    stats: ReqStats | None = None


class BatchStrOutput(msgspec.Struct, frozen=True, tag=True):
    outputs: tuple[StrOutput, ...]


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Start-up phases for the live panel: `phase` name, `done` in [0, 1], a line of `detail`, seconds so far."""

    phase: str
    done: float
    detail: str = ""
    elapsed_s: float = 0.0


class SchedulerReady(msgspec.Struct, frozen=True, tag=True):
    """Capacity and the clamps that the frontend validates with; `memory_sum` = the KV sum as printable lines; `info` = model facts."""

    num_pages: int
    page_size: int
    max_rows: int
    max_context_len: int
    max_prompt_len: int
    vocab_size: int
    memory_sum: tuple[str, ...] = ()
    info: dict[str, Any] = {}


class FlushCacheReqOutput(msgspec.Struct, frozen=True, tag=True):
    req_id: str
    success: bool
    message: str = ""


class GetStateReqOutput(msgspec.Struct, frozen=True, tag=True):
    req_id: str
    state: dict[str, Any]


HEALTH_PERIOD_S = 0.5


class HealthTick(msgspec.Struct, frozen=True, tag=True):
    """Sent every `HEALTH_PERIOD_S` while alive, from the loop that does the work: `steps` (of the detokenizer: batches) grows with progress."""

    steps: int
    role: str = "scheduler"


class SchedulerError(msgspec.Struct, frozen=True, tag=True):
    """Start-up or the whole engine failed; the process ends. `exit_code` 2 = the user's (bad file, bad config)."""

    message: str
    exit_code: int = 1


ToScheduler = TokenizedGenerateReqInput | AbortReq | StopReq | FlushCacheReq | GetStateReq | PauseReq | PinReq | ShutdownReq
ToDetokenizer = BatchTokenIDOutput
ToTokenizer = BatchStrOutput | LoadProgress | SchedulerReady | FlushCacheReqOutput | GetStateReqOutput | HealthTick | SchedulerError
