"""The Mooncake conversation trace as requests: an hour of a chat service, prompts as ids of blocks of 512 tokens (an id names the block and all
before it), lengths of outputs, times of arrival in buckets of three seconds. Format and data: Mooncake (Qin et al., FAST'25).

A request can be made in two sizes. Whole: 512 token ids a block, made from the block's id by a hash, on pages of 512 tokens. Small: a whole block is
2 tokens on a page of 2, what is left over is 1 token that nobody shares, and the output is just long enough to fill as many pages as the true one.
So the small request takes, shares, publishes and frees the same pages at the same points as the whole one, and costs 256 times less.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rootlet.bench.offline_bound import Visit
from rootlet.core.errors import BadConfig

FILE = "mooncake_conversation_trace.jsonl"
BLOCK_LEN = 512
SMALL_BLOCK_LEN = 2
WHOLE_VOCAB = 1 << 30
FIRST_ID = 16  # ids below are not used by prompts: outputs have theirs there


@dataclass(frozen=True, slots=True)
class Turn:
    """One line of the trace."""

    at_s: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...]

    @property
    def num_whole(self) -> int:
        """Blocks that are full; the last one may be partial."""
        return self.input_len // BLOCK_LEN

    @property
    def num_written_pages(self) -> int:
        """Whole pages that prompt and output fill; the last token drawn is never written."""
        return (self.input_len + self.output_len - 1) // BLOCK_LEN

    def visit(self) -> Visit:
        """As the bounds see it."""
        num_pages = -(-(self.input_len + self.output_len - 1) // BLOCK_LEN)
        return Visit(self.block_ids[: self.num_whole], (self.input_len - 1) // BLOCK_LEN, num_pages)


def read(folder: Path) -> list[Turn]:
    """The trace, in its order. Raises `BadConfig` without a folder that has it."""
    path = folder / FILE
    if not path.is_file():
        raise BadConfig(f"there is no {path}; give the folder that holds {FILE} with DATA=folder")
    turns = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        turns.append(Turn(row["timestamp"] / 1000, row["input_length"], max(row["output_length"], 1), tuple(row["hash_ids"])))
    return sorted(turns, key=lambda turn: turn.at_s)


def small(turn: Turn, number: int) -> tuple[bytes, int]:
    """(prompt as packed ids, tokens to draw). `number` makes the left-over token unique. Ids stay below `small_vocab`."""
    blocks = np.array(turn.block_ids[: turn.num_whole], dtype=np.int64)
    ids = FIRST_ID + 3 * np.repeat(blocks, SMALL_BLOCK_LEN)
    ids[1::SMALL_BLOCK_LEN] += 1
    if turn.input_len % BLOCK_LEN:
        ids = np.append(ids, FIRST_ID + 3 * number + 2)
    return ids.astype("<i4").tobytes(), max(1, SMALL_BLOCK_LEN * turn.num_written_pages + 1 - len(ids))


def small_vocab(turns: Sequence[Turn]) -> int:
    return FIRST_ID + 3 * (max(len(turns), 1 + max(max(turn.block_ids) for turn in turns)) + 1)


def whole(turn: Turn) -> tuple[bytes, int]:
    """(prompt as packed ids, tokens to draw), every token of it."""
    blocks = np.array(turn.block_ids, dtype=np.int64)[:, None]
    ids = FIRST_ID + (blocks * 1_000_003 + np.arange(BLOCK_LEN) * 7_919) % (WHOLE_VOCAB - FIRST_ID)  # at each place another one for each block
    return ids.astype("<i4").reshape(-1)[: turn.input_len].tobytes(), turn.output_len


def percent_of_tokens(num_blocks: int, turns: Sequence[Turn]) -> float:
    """So many whole blocks, in percent of all prompt tokens."""
    return 100.0 * num_blocks * BLOCK_LEN / sum(turn.input_len for turn in turns)


def repeated_blocks(turns: Sequence[Turn]) -> tuple[int, int]:
    """(blocks that begin a prompt and were seen before, blocks in all), partial ones included: the trace's own measure."""
    seen: set[int] = set()
    hits = total = 0
    for turn in turns:
        leading = True
        for block in turn.block_ids:
            leading = leading and block in seen
            hits += leading
        total += len(turn.block_ids)
        seen.update(turn.block_ids)
    return hits, total
