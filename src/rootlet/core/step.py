"""THE DOOR between the wings: a frozen `StepPlan` goes in, a `StepResult` comes out. Host numpy only; no torch, no `Req`.

Legend: B rows of the step, T tokens of the step, P page size. slot = page * P + position % P. Page 0 is never handed out: padding sink.

A plan is self-contained (scheduler.md 3.1, O3): lengths, rows and slots are snapshots; page tables travel as deltas to a table that the
executor holds; sampling state of a row travels once, in `RowInit`, when the row is (re)built, and lives with the executor until the next
`RowInit` of that pool row (D6: penalty counts are updated right after each draw).
Values of tokens still in flight never reach the host in time: `input_ids[t] == RELAY` means "the token that the previous step drew for this
pool row", which the executor keeps in its relay (FutureMap).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import ForwardMode, LogprobSpec, TokenLogprob

RELAY = -1

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowInit:
    """Sampling state of one pool row, sent when the row is built: at first admission and again after a retraction.

    `stop_ids` = EOS ids and stop_token_ids: masked while fewer than `params.min_new_tokens` outputs exist.
    `output_ids` = tokens already drawn before a retraction: penalties are seeded from them, and from `prompt_ids` for repetition.
    Noise of the draw that yields output number j (0-based, j = len(output_ids) + draws since) is keyed by
    (params.seed, params.choice_index, j, token id).
    """

    pool_row: int
    rid: str
    params: SamplingParams
    stop_ids: tuple[int, ...]
    prompt_ids: IntArray
    output_ids: IntArray
    logprobs: LogprobSpec | None = None


@dataclass(frozen=True, slots=True)
class PageDelta:
    """table[pool_row, start_page : start_page + len(pages)] = pages, applied before the step reads the table."""

    pool_row: int
    start_page: int
    pages: IntArray


@dataclass(frozen=True, slots=True)
class StateOp:
    """state[dst] = state[src]; `src` 0 = the state before any token (zeros)."""

    dst: int
    src: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward. Rows are ordered: extend rows first, then decode rows; tokens are concatenated in row order.

    prefix_lens[b] positions of row b are already in the pool; this step computes [prefix_lens[b], prefix_lens[b] + extend_lens[b]) =
    up to seq_lens[b]; a decode row has extend_len 1. `sample[b]`: draw a token from the last position's logits (False for a middle chunk:
    such a row must not write the relay). `out_cache_loc[t]` = slot that token t's K/V is written to.
    Plans may share arrays: DECODE plans with the very same `pool_rows` object have the same rows, and an executor need not look again.

    Models with sliding windows (`Capacity.window_len`) have a second page table, over the window pool: `window_deltas` change it as `page_deltas`
    change the first (a page 0 = nothing there any more), `out_window_loc[t]` = slot of token t in that pool. Layers with windows read and write
    through that table alone. Models with recurrent states (`Capacity.num_states`): `state_ops` are done in order, before the forward;
    `state_slots[b]` then holds the state after prefix_lens[b] tokens, and the forward leaves the one after seq_lens[b] there.
    """

    step: int
    mode: ForwardMode
    rids: tuple[str, ...]
    epochs: IntArray  # [B]
    pool_rows: IntArray  # [B], unique
    prefix_lens: IntArray  # [B]
    extend_lens: IntArray  # [B]
    sample: npt.NDArray[np.bool_]  # [B]
    input_ids: IntArray  # [T], RELAY where the token is still in flight
    positions: IntArray  # [T]
    out_cache_loc: IntArray  # [T]
    page_deltas: tuple[PageDelta, ...] = ()
    row_inits: tuple[RowInit, ...] = ()
    window_deltas: tuple[PageDelta, ...] = ()
    out_window_loc: IntArray | None = None  # [T]
    state_ops: tuple[StateOp, ...] = ()
    state_slots: IntArray | None = None  # [B]

    @property
    def num_rows(self) -> int:
        return len(self.rids)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def seq_lens(self) -> IntArray:
        return self.prefix_lens + self.extend_lens


class RowResult(msgspec.Struct, frozen=True):
    """What one row of a plan gave. `tokens` is empty for a middle chunk or a failed row, else >= 1 (more than one with speculation).

    `logprobs` parallels `tokens` when asked for. `prompt_logprobs` covers the prompt positions of this chunk that are >= `prompt_start`:
    entry for position p (of token prompt[p]) comes from the logits of position p - 1; the chunk [a, b) yields positions a+1..b (b only if it
    is a prompt position). `error` fails this request alone.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Same order as plans were submitted; rows in plan order. `forward_s` = wall seconds of the step in the executor."""

    step: int
    rows: tuple[RowResult, ...]
    forward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold. `num_pages` counts usable pages (ids 1..num_pages); `max_rows` pool rows 1..max_rows (row 0 = padding);
    `max_step_tokens` tokens of one plan; `max_context_len` positions of one row.

    Beside full attention: `window_len` keys visible (the query's own included; 0 = no sliding windows) and usable window pages; usable state
    slots (0 = no recurrent states), which may be kept at multiples of `state_grid` tokens."""

    num_pages: int
    page_size: int
    max_rows: int
    max_context_len: int
    max_step_tokens: int
    vocab_size: int
    window_len: int = 0
    num_window_pages: int = 0
    num_states: int = 0
    state_grid: int = 0

    @property
    def max_pages_per_row(self) -> int:
        return -(-self.max_context_len // self.page_size)

    @property
    def pool_len(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class ControlOp:
    """Out-of-band request to an executor: "flush" (forget all rows), "profile", "state"."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


class Executor(Protocol):
    """Runs plans in order. The scheduler cannot tell local, tensor-parallel, simulated and fake executors apart."""

    @property
    def capacity(self) -> Capacity: ...

    def submit(self, plan: StepPlan) -> None:
        """Launch. Never blocks on the result; at most `depth` plans are in flight. The plan must not be changed afterwards."""
        ...

    def collect(self) -> StepResult:
        """Result of the oldest plan in flight; blocks until it is there. Raises only when the executor as a whole is lost."""
        ...

    def control(self, op: ControlOp) -> dict[str, Any]: ...

    def close(self) -> None: ...
