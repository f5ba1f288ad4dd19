"""KV of multi-head and grouped-query attention: one K and one V plane a layer.

Owns the bytes (one allocation a layer, K first; int8 pages have a second one for their scales). Does not own page ids, and does not write:
`ops.store_kv` does. Called by the runner at start.
"blocked" is the native layout (K in blocks of 16 keys, dimension-major: no horizontal sums in QK), "plain" the reference's; see `KVLayer`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rootlet.config.model import ModelConfig
from rootlet.core.errors import BadConfig
from rootlet.kernels.ops import KVLayer
from rootlet.kv.pool import lazy_zeros

KEY_BLOCK = 16
DTYPES = {torch.float16: 2, torch.float32: 4, torch.int8: 1}
SCALE_BYTES = 4


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's K and V take over all layers."""
    head_bytes = config.head_dim * DTYPES[dtype] + (SCALE_BYTES if dtype == torch.int8 else 0)
    return 2 * config.num_layers * config.num_kv_heads * head_bytes


class MHATokenToKVPool:
    """Satisfies `TokenToKVPool`. `num_pages` usable pages (ids 1..num_pages) plus the sink."""

    __slots__ = ("_layers", "dtype", "layout", "num_bytes", "num_pages", "page_size")

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float16,
        layout: str = "blocked",
        allocate: Callable[[int], Tensor] = lazy_zeros,
    ) -> None:
        """`allocate(num_bytes)` gives zeroed uint8 memory on the device in use. Raises `BadConfig` on a page size the layout cannot hold."""
        if layout not in ("blocked", "plain"):
            raise BadConfig(f"KV layout must be blocked or plain, got {layout!r}")
        if dtype not in DTYPES:
            raise BadConfig(f"KV dtype must be float16, float32 or int8, got {dtype}")
        if page_size < 1 or (layout == "blocked" and page_size % KEY_BLOCK):
            raise BadConfig(f"page size {page_size} does not fit KV layout {layout}: blocked needs a multiple of {KEY_BLOCK} (--page-size)")
        if num_pages < 1:
            raise BadConfig(f"a KV pool needs at least 1 page, got {num_pages} (--mem, --max-total-tokens)")
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.layout = layout
        self._layers = [self._make_layer(config, allocate) for _ in range(config.num_layers)]
        self.num_bytes = kv_bytes_per_token(config, dtype) * (num_pages + 1) * page_size

    def _make_layer(self, config: ModelConfig, allocate: Callable[[int], Tensor]) -> KVLayer:
        pages, p, heads, d = self.num_pages + 1, self.page_size, config.num_kv_heads, config.head_dim
        plane = pages * heads * p * d
        both = allocate(2 * plane * DTYPES[self.dtype]).view(self.dtype)
        k_shape = (pages, heads, p // KEY_BLOCK, d, KEY_BLOCK) if self.layout == "blocked" else (pages, heads, p, d)
        layer = KVLayer(k=both[:plane].view(k_shape), v=both[plane:].view(pages, heads, p, d), page_size=p, layout=self.layout)
        if self.dtype == torch.int8:
            scales = allocate(2 * pages * heads * p * SCALE_BYTES).view(torch.float32).view(2, pages, heads, p)
            layer.k_scales, layer.v_scales = scales[0], scales[1]
        return layer

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer(self, layer_id: int) -> KVLayer:
        return self._layers[layer_id]
