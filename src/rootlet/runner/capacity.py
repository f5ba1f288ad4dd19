"""How much KV an executor can hold: the memory sum, once, at start. Pure arithmetic over what it is told, but for `available_bytes`.

    available - weights - workspace - reserve = left;   auto pool = min(left * 25 %, max_running * ctx_len)

A quarter, and never more than every row could fill: a small model on a big box leaves the box to others (--mem and --max-total-tokens say
otherwise). The pool is address space: pages cost memory when they are first written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from rootlet.config.model import ModelConfig
from rootlet.config.schema import RuntimeConfig
from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity

GIB = 1 << 30
AUTO_SHARE = 0.25
STEP_SHARE = 0.1
MIN_STEP_TOKENS = 512
RESERVE_SHARE = 0.05
RESERVE_MIN_BYTES = 256 << 20
MAX_SLOTS = 2**31 - 1
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemorySum:
    """All in bytes. `lines` = the sum as people read it."""

    capacity: Capacity
    kv_bytes: int
    lines: tuple[str, ...]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def available_bytes(cgroup: Path = CGROUP) -> int:
    """What this process may still take: the system's available memory, or what the control group (v2, v1) leaves, whichever is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def context_len(config: RuntimeConfig, model: ModelConfig) -> int:
    """Longest prompt + output. Raises `BadConfig` when more is asked for than the model has positions."""
    wanted = config.model.ctx_len
    if wanted is not None and wanted > model.max_context_len:
        raise BadConfig(f"--ctx-len {wanted} is more than the {model.max_context_len} positions that this model was trained for")
    return model.max_context_len if wanted is None else wanted


def check_position_tables(ctx_len: int, model: ModelConfig, *, available: int) -> None:
    """The table of positions is made with the model, before the KV sum is known: a context of absurd length must not take the machine's memory.

    Raises `BadConfig`.
    """
    table = 4 * ctx_len * model.rope.rotary_dim
    if table > available * STEP_SHARE:
        raise BadConfig(
            f"the model claims {ctx_len} positions, whose table alone takes {_gib(table)} of {_gib(available)} available; set --ctx-len to what is "
            "needed"
        )


def token_workspace_bytes(model: ModelConfig) -> int:
    """Activations of one token: the widest buffers of one layer; layers reuse them."""
    heads = model.num_heads + 2 * model.num_kv_heads
    return 4 * (4 * model.hidden_size + 3 * heads * model.head_dim + 3 * model.intermediate_size)


def max_step_tokens(config: RuntimeConfig, model: ModelConfig, available: int) -> int:
    """Tokens of the largest plan: a prefill step and, in a mixed one, a decode token of each running row; less when its activations would take
    more than `STEP_SHARE` of the memory. The scheduler cuts its chunks to it."""
    s = config.scheduler
    fits = int(available * STEP_SHARE) // token_workspace_bytes(model)
    return min(max(s.max_prefill, s.chunked_prefill), max(fits, MIN_STEP_TOKENS)) + s.max_running


def workspace_bytes(model: ModelConfig, *, step_tokens: int, max_rows: int, ctx_len: int) -> int:
    """Activations of the largest step, logits of every row, rope table."""
    return step_tokens * token_workspace_bytes(model) + 4 * (max_rows * (model.vocab_size + model.hidden_size) + ctx_len * model.rope.rotary_dim)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _wanted_tokens(config: RuntimeConfig, *, left: int, token_bytes: int, all_rows: int) -> tuple[int, str]:
    """Tokens the pool shall hold, and by which rule."""
    cache = config.cache
    if cache.max_total_tokens is not None:
        return cache.max_total_tokens, f"--max-total-tokens {cache.max_total_tokens}"
    if cache.mem != "auto":
        try:
            gib = float(cache.mem)
        except ValueError:
            raise BadConfig(f"--mem must be auto or a number of GiB, got {cache.mem!r}") from None
        return int(gib * GIB) // token_bytes, f"--mem {cache.mem}"
    share = int(left * AUTO_SHARE) // token_bytes
    if share <= all_rows:
        return share, f"auto: {AUTO_SHARE:.0%} of what is left"
    return all_rows, f"auto: {config.scheduler.max_running} rows (--max-running) of full context"


def _too_small(config: RuntimeConfig, rule: str, *, tokens: int, token_bytes: int, parts: str) -> str:
    """Why there is no pool at all, and which knob would give one."""
    cache = config.cache
    page = f"one page of --page-size {cache.page_size} ({cache.page_size * token_bytes} bytes)"
    if cache.max_total_tokens is None and cache.mem == "auto":
        what = "lower --ctx-len, --max-running, --max-prefill or --chunked-prefill, or let --mem take more than the automatic share"
        return f"the machine leaves a KV pool of {tokens} tokens ({rule}), less than {page}: {parts}; {what}"
    least = f"--mem {2 * cache.page_size * token_bytes / GIB:.3g}" if cache.max_total_tokens is None else f"--max-total-tokens {cache.page_size}"
    return f"{rule} gives a KV pool of {tokens} tokens, less than {page}: give {least} or more, or a smaller --page-size"


def plan_memory(config: RuntimeConfig, model: ModelConfig, *, available: int, weights: int, token_bytes: int) -> MemorySum:
    """The KV sum. `available` bytes before loading, `weights` bytes the weights take, `token_bytes` KV bytes a token. Raises `BadConfig`."""
    ctx_len, page_size, rows = context_len(config, model), config.cache.page_size, config.scheduler.max_running
    steps = max_step_tokens(config, model, available)
    workspace = workspace_bytes(model, step_tokens=steps, max_rows=rows, ctx_len=ctx_len)
    reserve = max(RESERVE_MIN_BYTES, int(available * RESERVE_SHARE))
    left = available - weights - workspace - reserve
    tokens, rule = _wanted_tokens(config, left=max(left, 0), token_bytes=token_bytes, all_rows=rows * (-(-ctx_len // page_size) * page_size))
    num_pages = min(tokens, MAX_SLOTS - page_size) // page_size
    kv_bytes = (num_pages + 1) * page_size * token_bytes
    parts = f"{_gib(available)} available - {_gib(weights)} weights - {_gib(workspace)} workspace - {_gib(reserve)} reserve = {_gib(left)} left"
    if num_pages < 1:
        raise BadConfig(_too_small(config, rule, tokens=tokens, token_bytes=token_bytes, parts=parts))
    if kv_bytes > left:
        better = "lower --max-total-tokens or --mem, or leave both out"
        raise BadConfig(f"the KV pool of {num_pages * page_size} tokens needs {_gib(kv_bytes)} ({rule}), but {parts}; {better}")
    lines = (
        parts,
        f"{_gib(kv_bytes)} KV ({rule}) = {num_pages} pages of {page_size} = {num_pages * page_size} tokens of {token_bytes} bytes",
        f"context {ctx_len} tokens, {rows} rows, {steps} tokens a step",
    )
    capacity = Capacity(
        num_pages=num_pages,
        page_size=page_size,
        max_rows=rows,
        max_context_len=ctx_len,
        max_step_tokens=steps,
        vocab_size=model.vocab_size,
    )
    return MemorySum(capacity, kv_bytes, lines)
