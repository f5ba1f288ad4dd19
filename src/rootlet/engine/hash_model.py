"""A whole model without weights, for process tests and for looking at the server without one: HashLM, and a tokenizer of 61 characters.

Chosen by ROOTLET_TEST_EXECUTOR=hash_lm (read in `core/env.py` only); `hash_lm:5` makes each step take at least 5 ms, and `hash_lm+swa+mamba` gives
it windows and states to be kept for it. Never used otherwise.
"""

from __future__ import annotations

import string
import time
from collections.abc import Sequence
from typing import Any

from rootlet.config.schema import RuntimeConfig
from rootlet.core.errors import BadConfig
from rootlet.core.hash_lm import HashLM, HashModel
from rootlet.core.step import Capacity, ControlOp, Executor, StepPlan, StepResult
from rootlet.frontend.chat_messages import TemplateTraits, normalise_messages

SPECIALS = ("<pad>", "<bos>", "<eos>")
CHARS = string.ascii_letters + string.digits[:8] + " "
VOCAB_SIZE = len(SPECIALS) + len(CHARS)
EOS_ID = 2
DEFAULT_CTX_LEN = 8192
DEFAULT_POOL_LEN = 65536
MAX_STEP_TOKENS = 65536
WINDOW_LEN = 48


class HashTokenizer:
    """One id a character; a character outside the alphabet is spelled as a space."""

    vocab_size = VOCAB_SIZE
    left_context_dependent = False

    def __init__(self) -> None:
        self._id_of = {char: len(SPECIALS) + k for k, char in enumerate(CHARS)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        space = self._id_of[" "]
        return ([1] if add_special_tokens else []) + [self._id_of.get(char, space) for char in text]

    def min_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.id_to_token(i) for i in ids if not (skip_special_tokens and self.is_special(i)))

    def token_bytes(self, token_id: int) -> bytes:
        return self.id_to_token(token_id).encode()

    def id_to_token(self, token_id: int) -> str:
        return SPECIALS[token_id] if token_id < len(SPECIALS) else CHARS[token_id - len(SPECIALS)]

    def is_special(self, token_id: int) -> bool:
        return token_id < len(SPECIALS)


class HashTemplate:
    """role: content, one message after the other."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt text of `messages`; template variables are ignored."""
        lines = [f"{m['role']} {m.get('content') or ''}" for m in normalise_messages(messages, TemplateTraits())]
        if tools:
            lines.insert(0, f"tools {len(tools)}")
        return " ".join([*lines, "assistant "] if add_generation_prompt and not continue_final_message else lines)


class PacedExecutor:
    """Makes every step take at least `step_s`, so that a test can catch requests in the middle."""

    def __init__(self, inner: Executor, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        time.sleep(self._step_s)
        return self._inner.collect()

    def control(self, op: ControlOp) -> dict[str, Any]:
        return self._inner.control(op)

    def close(self) -> None:
        self._inner.close()


def hash_executor(config: RuntimeConfig, choice: str = "hash_lm") -> Executor:
    """`choice` = "hash_lm", with "+swa" and "+mamba" for more components, and ":MILLISECONDS". Raises `BadConfig`."""
    name, _, step_ms = choice.partition(":")
    base, *parts = name.split("+")
    if base != "hash_lm" or not {"swa", "mamba"}.issuperset(parts) or not (step_ms or "0").isdigit():
        raise BadConfig(f"unknown test executor {choice!r} (known: hash_lm[+swa][+mamba][:MILLISECONDS])")
    page, rows = config.cache.page_size, config.scheduler.max_running
    pool_len = config.cache.max_total_tokens or DEFAULT_POOL_LEN
    capacity = Capacity(
        num_pages=max(1, pool_len // page),
        page_size=page,
        max_rows=rows,
        max_context_len=config.model.ctx_len or DEFAULT_CTX_LEN,
        max_step_tokens=MAX_STEP_TOKENS,
        vocab_size=VOCAB_SIZE,
        window_len=WINDOW_LEN if "swa" in parts else 0,
        num_window_pages=(rows + 4) * (WINDOW_LEN // page + 3) if "swa" in parts else 0,
        num_states=3 * rows if "mamba" in parts else 0,
        state_grid=page if "mamba" in parts else 0,
    )
    executor = HashLM(capacity, model=HashModel(vocab_size=VOCAB_SIZE, eos_id=EOS_ID))
    return PacedExecutor(executor, int(step_ms) / 1000) if step_ms else executor
