"""From the configuration to the cache: which components a model needs, and whether prefixes are shared at all.

Called once, by whoever assembles a scheduler. Owns nothing.
"""

from __future__ import annotations

from rootlet.cache.events import EventRecorder
from rootlet.cache.host_tier import HostTier
from rootlet.cache.unified_radix_cache import UnifiedRadixCache
from rootlet.config.schema import CacheArgs
from rootlet.core.errors import BadConfig
from rootlet.core.step import Capacity
from rootlet.memory.page_allocator import PageAllocator
from rootlet.memory.req_to_token import ReqToTokenPool
from rootlet.memory.state_allocator import StateAllocator
from rootlet.memory.swa_allocator import SWAAllocator


def build_cache(args: CacheArgs, capacity: Capacity, *, recorder: EventRecorder | None = None, tier: HostTier | None = None) -> UnifiedRadixCache:
    """The cache, with the allocators and page tables that fit what the executor can hold (`capacity` wins over `args.page_size`).

    Components: full attention always; sliding windows where `capacity.window_len` says so, recurrent states where there are slots for them.
    Raises: BadConfig for an unknown `args.evict`, or for pools in which no request could ever run.
    """
    rows = ReqToTokenPool(capacity.max_rows, capacity.max_pages_per_row)
    return UnifiedRadixCache(
        page_size=capacity.page_size,
        allocator=PageAllocator(capacity.num_pages),
        req_to_token=rows,
        policy=args.evict,
        enabled=args.prefix_cache,
        window=_window(capacity, rows),
        states=_states(capacity),
        recorder=recorder,
        tier=tier,
    )


def _window(capacity: Capacity, rows: ReqToTokenPool) -> SWAAllocator | None:
    if not capacity.window_len:
        return None
    least = -(-capacity.window_len // capacity.page_size) + 1
    if capacity.num_window_pages < least:
        raise BadConfig(
            f"{capacity.num_window_pages} window pages: a window of {capacity.window_len} tokens needs {least} pages of "
            f"{capacity.page_size}; raise --mem or --max-total-tokens",
            param="max_total_tokens",
        )
    return SWAAllocator(capacity.num_window_pages, capacity.window_len, rows)


def _states(capacity: Capacity) -> StateAllocator | None:
    if not capacity.num_states:
        return None
    if capacity.state_grid < 1 or capacity.state_grid % capacity.page_size:
        raise BadConfig(f"states every {capacity.state_grid} tokens: must be a multiple of page_size {capacity.page_size}", param="page_size")
    return StateAllocator(capacity.num_states, capacity.state_grid)
