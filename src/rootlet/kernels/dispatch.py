"""Chooses the kernel table of this process, once, and says why. Device words stay behind the import of the native table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rootlet.core.errors import BadConfig
from rootlet.device.base import Graph
from rootlet.kernels import reference_attention
from rootlet.kernels.ops import AttentionMeta, KernelTable, KVLayer
from rootlet.kernels.reference import ReferenceTable

NATIVE_PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """`attention`: name of the attention backend that fits `table`. `native`: linear layers and sampling are native. `set_threads` sizes the
    process's team. `new_graph`: an empty graph that every op of the table records itself in, None = the table cannot. `reason`: for the log."""

    table: KernelTable
    attention: str
    native: bool
    set_threads: Callable[[int], None]
    new_graph: Callable[[], Graph] | None
    reason: str


class PlainAttentionTable:
    """A native table whose attention is the reference's, over plain KV: for page sizes that native attention does not take."""

    name = "native, reference attention"

    def __init__(self, native: KernelTable) -> None:
        self.prepare_linear = native.prepare_linear
        self.embedding = native.embedding
        self.linear = native.linear
        self.rms_norm = native.rms_norm
        self.head_norm = native.head_norm
        self.rope = native.rope
        self.silu_and_mul = native.silu_and_mul
        self.gather_rows = native.gather_rows
        self.sample = native.sample

    def store_kv(self, k: Tensor, v: Tensor, layer: KVLayer, out_cache_loc: Tensor) -> None:
        reference_attention.store_kv(k, v, layer, out_cache_loc)

    def attention(self, q: Tensor, layer: KVLayer, meta: AttentionMeta, scale: float, window: int | None = None) -> Tensor:
        return reference_attention.attention(q.contiguous(), layer, meta, scale, window)


def _reference(reason: str) -> KernelChoice:
    return KernelChoice(ReferenceTable(), "reference", False, torch.set_num_threads, None, reason)


def choose(wanted: str, *, page_size: int) -> KernelChoice:
    """`wanted`: auto | native | reference (--kernels). Raises `BadConfig` when native kernels were asked for and there are none."""
    if wanted == "reference":
        return _reference("reference kernels, as asked for (--kernels reference): slow")
    try:
        from rootlet.kernels.cpu.table import NativeTable
    except ImportError as error:
        if wanted == "native":
            raise BadConfig(f"--kernels native: not built here ({error}); reinstall with a C++17 compiler, or use --kernels auto") from error
        return _reference(f"reference kernels, slow: the native ones are not built here ({error})")
    native = NativeTable()

    def set_threads(threads: int) -> None:
        torch.set_num_threads(1)
        native.set_threads(threads)

    if page_size in NATIVE_PAGE_SIZES:
        return KernelChoice(native, "cpu", True, set_threads, native.new_graph, f"{native.name} kernels")
    sizes = ", ".join(map(str, NATIVE_PAGE_SIZES))
    reason = f"{native.name} kernels with reference attention and no graph: --page-size {page_size} is none of {sizes}"
    return KernelChoice(PlainAttentionTable(native), "reference", True, set_threads, None, reason)
