"""`Req`: one request as the scheduler sees it: a phase, an epoch, three counts, and who owns which KV. Integers and bytes; no torch.

    planned   KV positions that a launched plan has computed or will compute
    outputs   tokens that are known (their results were processed)
    pending   draws that are launched and not yet known
    branch_at where others part from a cached prefix whose window or state is missing: a chunk ends there, so that the next one hits; 0 = nowhere
    cold      it could not run beside what it shares: it takes nothing from the cache, and gives to it only at its end
    probed    where the last probe of the cache ended (`KvOwner.probe`), from where the next one goes on
    PREFILL:  planned < fill_len = prompt + outputs at admission
    DECODE :  planned = prompt + outputs + pending - 1          (I4)

Written only by the scheduler. Does not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import RadixKey, ReqKvInfo
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import IntArray
from rootlet.core.types import LogprobSpec, Namespace, Phase, TokenLogprob
from rootlet.ipc.messages import DetokSpec
from rootlet.scheduler.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ReqSpec:
    """What never changes. `max_new` is clamped (budget.py); `stop_ids` mask while below min_new_tokens, `end_ids` (a subset) end the request."""

    rid: str
    seq: int
    namespace: Namespace
    params: SamplingParams
    max_new: int
    stop_ids: tuple[int, ...]
    end_ids: frozenset[int]
    detok: DetokSpec
    logprobs: LogprobSpec | None = None
    stream: bool = False
    priority: int = 0
    parent_rid: str | None = None
    routing_key: str | None = None


@dataclass(slots=True, eq=False)
class Tenant:
    """Whose request it is, and what they were served, in weighted tokens (policies/fairness.py)."""

    name: str | None = None
    served: int = 0
    num_live: int = 0


@dataclass(slots=True)
class ReqOutput:
    """Stream cursors. Outputs are append-only, so a retraction never moves them back."""

    num_sent: int = 0
    spec_sent: bool = False
    terminal_sent: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs_sent: bool = False


@dataclass(slots=True)
class ReqTimes:
    """Seconds on the scheduler's clock, and counts, for `ReqStats` and the request log."""

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    cached_len: int = 0
    num_chunks: int = 0
    num_retractions: int = 0
    num_preemptions: int = 0
    prefilled_at_arrival: int = 0
    num_passes: int = 0
    wait_reasons: dict[str, int] = field(default_factory=dict)
    last_why: str = ""

    def waited_for(self, reason: str, why: str = "") -> None:
        self.wait_reasons[reason] = self.wait_reasons.get(reason, 0) + 1
        self.last_why = why


@dataclass(slots=True, eq=False)
class Req:
    spec: ReqSpec
    tokens: bytearray
    prompt_len: int
    times: ReqTimes
    phase: Phase = Phase.WAITING
    epoch: int = 0
    outputs: list[int] = field(default_factory=list)
    fill_len: int = 0
    planned: int = 0
    pending: int = 0
    pending_chunks: int = 0
    outputs_at_admission: int = 0
    prefill_done: bool = False
    branch_at: int = 0
    cold: bool = False
    packed: bytes = b""
    probed: UnifiedTreeNode | None = None
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    tenant: Tenant = field(default_factory=Tenant)
    timeline: Timeline = field(default_factory=Timeline)
    out: ReqOutput = field(default_factory=ReqOutput)

    @property
    def rid(self) -> str:
        return self.spec.rid

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and outputs."""
        return self.prompt_len + len(self.outputs)

    @property
    def left_new(self) -> int:
        """Draws that may still be launched."""
        return self.spec.max_new - len(self.outputs) - self.pending

    @property
    def ends_in_flight(self) -> bool:
        """Its last draw is launched: it certainly ends by length when that result arrives (architecture D2)."""
        return (self.pending > 0 or self.pending_chunks > 0) and self.left_new <= 0 and self.planned >= self.fill_len

    def append(self, token: int) -> None:
        self.outputs.append(token)
        self.tokens += token.to_bytes(4, "little", signed=True)

    def ids(self, start: int, stop: int) -> IntArray:
        """Known token ids of positions [start, stop), a copy."""
        return np.frombuffer(bytes(self.tokens[4 * start : 4 * stop]), dtype="<i4")

    def key(self, length: int, *, limit: int | None = None) -> RadixKey:
        """The first `length` tokens as a cache key; only the first `limit` may match. The bytes of the last call are kept: a queue is probed again
        and again, and tokens never change."""
        if len(self.packed) != 4 * length:
            self.packed = bytes(memoryview(self.tokens)[: 4 * length])
        return RadixKey(self.spec.namespace, self.packed, limit)

    def match_limit(self) -> int:
        """How many leading tokens may come from the cache: the last one is always computed, and so are positions whose logprobs are wanted.

        The logprob of position p comes from the logits of p - 1, so that position has to be computed too.
        """
        limit = self.num_tokens - 1
        start = None if self.spec.logprobs is None else self.spec.logprobs.prompt_start
        if start is not None and not self.prompt_logprobs_complete():
            limit = min(limit, max(start + len(self.out.prompt_logprobs) - 1, 0))
        return limit

    def prompt_logprobs_complete(self) -> bool:
        """True when nothing is missing (also when none were asked for)."""
        start = None if self.spec.logprobs is None else self.spec.logprobs.prompt_start
        return start is None or len(self.out.prompt_logprobs) >= self.prompt_len - start
