"""Plain value types that both wings and every process share. No torch, no I/O.

One word a thing (docs/glossary.md): a *row* is one request's line in `ReqToTokenPool`, a *page* holds `page_size` token slots, slot =
page * page_size + offset. `*_len` counts tokens, `num_*` counts things.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec


class Phase(StrEnum):
    """Where a request stands. Exactly one at any time; queues are views of it (architecture D1)."""

    GATED = "gated"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class ForwardMode(IntEnum):
    """What the rows of one step are."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3


class Namespace(NamedTuple):
    """Selects the root of the radix tree: requests of different namespaces can never share a page. None and "" are the same: no isolation."""

    lora_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class FinishKind(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Finish(msgspec.Struct, frozen=True):
    """Why a request ended. `matched` is the stop string, or the stop/EOS token id. ABORT and ERROR carry `status` (HTTP), `code`, `message`."""

    kind: FinishKind
    matched: str | int | None = None
    status: int = 200
    code: str | None = None
    message: str | None = None


class LogprobSpec(msgspec.Struct, frozen=True):
    """What log-probabilities a request wants (natural log, of the raw distribution, before penalties and temperature).

    `top_n` alternatives a token (0 = only the chosen one); `prompt_start` = first prompt position whose logprob is wanted, None = none.
    The cache match is capped at `prompt_start` so that those positions are computed.
    """

    top_n: int = 0
    prompt_start: int | None = None
    token_ids: tuple[int, ...] = ()


LOGPROB_FLOOR = -9999.0
"""Stands for the logarithm of zero, so that every reply is strict JSON (OpenAI's number)."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One position: the token, its logprob (None for the first prompt token, which nothing predicts), and `top_n` alternatives, best first."""

    token_id: int
    logprob: float | None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
