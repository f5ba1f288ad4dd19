"""From the configuration to the cache: which components a model needs, and whether prefixes are shared at all.

Called once, by whoever assembles a scheduler. Owns nothing.
"""

from __future__ import annotations

from rootlet.cache.unified_radix_cache import UnifiedRadixCache
from rootlet.config.schema import CacheArgs
from rootlet.core.step import Capacity
from rootlet.memory.page_allocator import PageAllocator
from rootlet.memory.req_to_token import ReqToTokenPool


def build_cache(args: CacheArgs, capacity: Capacity) -> UnifiedRadixCache:
    """The cache, with the allocator and the page table that fit what the executor can hold (`capacity` wins over `args.page_size`).

    Raises: BadConfig for an unknown `args.evict`.
    """
    return UnifiedRadixCache(
        page_size=capacity.page_size,
        allocator=PageAllocator(capacity.num_pages),
        req_to_token=ReqToTokenPool(capacity.max_rows, capacity.max_pages_per_row),
        policy=args.evict,
        enabled=args.prefix_cache,
    )
