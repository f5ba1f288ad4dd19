"""`make bench-trace DATA=folder`: the Mooncake conversation trace through the real scheduler and cache behind an executor that costs nothing.

First with unlimited pages, beside the trace's own upper bound; then in pools of 1, 3, 10 and 30 percent of its unique blocks under each eviction
policy, beside the best that any choice of what to keep could do (`offline_bound.py`). Requests come at their times; a step takes no time, so those
of one three-second bucket run together and are done before the next. `--rows 1` serves one at a time. Requests are made small (`mooncake.py`);
`--whole` runs the unlimited pool with every token.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rootlet.bench import mooncake
from rootlet.bench.instant import InstantExecutor, request
from rootlet.bench.mooncake import BLOCK_LEN, SMALL_BLOCK_LEN, Turn
from rootlet.bench.offline_bound import best_hits, unlimited_hits
from rootlet.bench.sections import replace_section
from rootlet.cache.eviction import POLICIES
from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import VirtualClock
from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity
from rootlet.scheduler.loop import turn as turn_loop
from rootlet.scheduler.scheduler import Scheduler, Sinks

POOLS = (1, 3, 10, 30)
EVICTIONS = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
CHUNK_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Served:
    """`hit_blocks` at first admission; `seconds` of this process's CPU."""

    hit_blocks: int
    evicted_pages: int
    retractions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Size:
    """How requests are made: tokens a block (= a page), and the maker."""

    block_len: int
    vocab_size: int
    make: Callable[[Turn, int], tuple[bytes, int]]


def size_of(turns: Sequence[Turn], *, is_whole: bool) -> Size:
    if is_whole:
        return Size(BLOCK_LEN, mooncake.WHOLE_VOCAB, lambda turn, number: mooncake.whole(turn))
    return Size(SMALL_BLOCK_LEN, mooncake.small_vocab(turns), mooncake.small)


def serve(turns: Sequence[Turn], *, num_pages: int, evict: str = "lru", rows: int = 64, size: Size | None = None) -> Served:
    """All of the trace through one scheduler. Every request must fit the pool."""
    size = size or size_of(turns, is_whole=False)
    most = max(turn.input_len + turn.output_len for turn in turns) // BLOCK_LEN + 2
    chunk = CHUNK_BLOCKS * size.block_len
    capacity = Capacity(num_pages, size.block_len, rows, most * size.block_len, chunk, size.vocab_size)
    clock, begin_s = VirtualClock(), time.process_time()
    scheduler = Scheduler(
        executor=InstantExecutor(capacity),
        scheduler_args=SchedulerArgs(max_running=rows, chunked_prefill=chunk, max_prefill=chunk, max_queue=len(turns)),
        cache_args=CacheArgs(page_size=size.block_len, evict=evict),
        eos_token_ids=(2,),
        clock=clock,
        sinks=Sinks(lambda batch: None, lambda message: None),
    )
    at = 0
    while at < len(turns) or not scheduler.idle:
        if scheduler.idle:
            clock.advance(max(0.0, turns[at].at_s - clock.now()))
        messages = []
        while at < len(turns) and turns[at].at_s <= clock.now():
            messages.append(request(f"r{at}", *size.make(turns[at], at)))
            at += 1
        turn_loop(scheduler, messages, 1)
    counters, stats = scheduler.state.counters, scheduler.state.kv.cache.stats()
    assert counters.finished_length == len(turns), f"{counters.finished_length} of {len(turns)} requests were answered"
    return Served(counters.cached_tokens // size.block_len, int(stats["evicted_pages"]), counters.retractions, time.process_time() - begin_s)


def _unlimited(turns: Sequence[Turn], rows: int, *, is_whole: bool) -> list[str]:
    """Lines about the run that never evicts."""
    repeated, blocks = mooncake.repeated_blocks(turns)
    unique = len({block for turn in turns for block in turn.block_ids})
    bound = unlimited_hits([turn.visit() for turn in turns])
    pages = sum(turn.visit().num_pages for turn in turns)
    lines = [
        f"{len(turns)} requests, {sum(t.input_len for t in turns)} prompt tokens in {blocks} blocks of {BLOCK_LEN}, {unique} of them unique.",
        f"Repeated at the beginning of a prompt: {repeated} blocks, {100 * repeated / blocks:.1f} %.",
        "",
        "| unlimited pages | hit blocks | % of all blocks | % of prompt tokens | CPU s |",
        "|---|---|---|---|---|",
        f"| bound (whole blocks, the last token always computed) | {_cells(bound, blocks, turns)} | |",
    ]
    for each in sorted({1, rows}):
        served = serve(turns, num_pages=pages, rows=each)
        assert served.evicted_pages == 0, "nothing is evicted from an unlimited pool"
        lines.append(f"| {_rows(each)} | {_cells(served.hit_blocks, blocks, turns)} | {served.seconds:.1f} |")
    if is_whole:
        served = serve(turns, num_pages=pages, rows=rows, size=size_of(turns, is_whole=True))
        lines.append(f"| {_rows(rows)}, every token | {_cells(served.hit_blocks, blocks, turns)} | {served.seconds:.1f} |")
    return lines


def _rows(rows: int) -> str:
    return "one request at a time" if rows == 1 else f"up to {rows} at once"


def _cells(hits: int, blocks: int, turns: Sequence[Turn]) -> str:
    return f"{hits} | {100 * hits / blocks:.2f} | {mooncake.percent_of_tokens(hits, turns):.2f}"


def _pools(turns: Sequence[Turn], rows: int) -> list[str]:
    """A line a policy, percent of prompt tokens hit in each pool, and of the bound."""
    unique = len({block for turn in turns for block in turn.block_ids})
    visits = [turn.visit() for turn in turns]
    sizes = {percent: max(unique * percent // 100, *(visit.num_pages for visit in visits)) for percent in POOLS}
    bounds = {percent: best_hits(visits, pages) for percent, pages in sizes.items()}
    heads = (f"{percent} % = {pages} pages" for percent, pages in sizes.items())
    lines = [f"| eviction | {' | '.join(heads)} | retractions | CPU s |", "|---|" + "---|" * (len(POOLS) + 2)]
    optimum = (f"{mooncake.percent_of_tokens(hits, turns):.2f}" for hits in bounds.values())
    lines.append(f"| offline optimum | {' | '.join(optimum)} | | |")
    for evict in EVICTIONS:
        assert evict in POLICIES, "the policies of the cache"
        served = {percent: serve(turns, num_pages=pages, evict=evict, rows=rows) for percent, pages in sizes.items()}
        hits = (f"{mooncake.percent_of_tokens(s.hit_blocks, turns):.2f} ({s.hit_blocks / bounds[p]:.0%})" for p, s in served.items())
        lines.append(
            f"| {evict} | {' | '.join(hits)} | {sum(s.retractions for s in served.values())} | {sum(s.seconds for s in served.values()):.1f} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print both tables; `--write` puts them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, type=Path, help=f"folder with {mooncake.FILE}")
    parser.add_argument("--rows", type=int, default=64, help="requests at once")
    parser.add_argument("--whole", action="store_true", help="the unlimited pool with every token, too: some minutes")
    parser.add_argument("--first", type=int, help="only so many requests of the trace")
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    options = parser.parse_args()
    begin_s = time.monotonic()
    try:
        turns = mooncake.read(options.data)[: options.first]
    except BadConfig as error:
        parser.error(error.message)
    gc.disable()
    lines = [*_unlimited(turns, options.rows, is_whole=options.whole), ""]
    print("\n".join(lines), flush=True)
    pools = _pools(turns, options.rows)
    took = f"The whole run took {time.monotonic() - begin_s:.0f} s."
    print("\n".join([*pools, "", took]))
    if options.write is not None:
        replace_section(options.write / "benchmarks.md", "make bench-trace", "\n".join([*lines, *pools, "", took]))


if __name__ == "__main__":
    main()
