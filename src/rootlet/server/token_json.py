"""How one token and one log-probability look in JSON, in every dialect. Pure."""

from __future__ import annotations

import math

from rootlet.core.types import LOGPROB_FLOOR
from rootlet.server.door import Tokenizer


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI's floor stands for it."""
    if logprob is None or (math.isfinite(logprob) and logprob > LOGPROB_FLOOR):
        return logprob
    return LOGPROB_FLOOR if math.isnan(logprob) or logprob < 0 else 0.0


def alone(tokenizer: Tokenizer, token_id: int) -> str:
    """A token out of context: its text if its bytes are whole characters, else `bytes:\\xNN...`, which is unique and reversible."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
