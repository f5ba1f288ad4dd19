"""The one internal request and event model that every dialect (OpenAI, native, Python API...) is a pure function over (architecture D12)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Finish, LogprobSpec, TokenLogprob
from rootlet.ipc.messages import ReqStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReq:
    """One prompt, `sampling.n` choices. Exactly one of `prompt` (text, tokenized here, BOS added as the tokenizer says) and `input_ids`.

    A dialect renders chat messages to `prompt` itself with `add_special_tokens=False` (the template writes BOS). `rid` unique; None = made.
    `batch_rid` is the id of the whole call where it holds several prompts: an abort of it is one of each. `param` names the field of the dialect that
    the prompt came from, for error messages.
    """

    prompt: str | None = None
    input_ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobSpec | None = None
    stream: bool = False
    rid: str | None = None
    batch_rid: str | None = None
    lora_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_s: float | None = None
    user: str | None = None
    routing_key: str | None = None
    param: str = "prompt"


class GenerateChunk(msgspec.Struct, frozen=True):
    """One event of one choice. `text`, `token_ids`, `logprobs` are deltas; `completion_len` a running total. `finish` set = the last of this
    choice; it is never followed by another of the same `index`. `prompt_logprobs` comes once, in the first chunk of choice 0."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    prompt_len: int
    completion_len: int
    cached_len: int
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    stats: ReqStats | None = None
    seed: int | None = None
    rid: str = ""
