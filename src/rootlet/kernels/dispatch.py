"""Chooses the kernel table of this process, once, and says why. Device words stay behind the import of the native table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rootlet.core.errors import BadConfig
from rootlet.kernels import reference_attention
from rootlet.kernels.ops import AttentionMeta, KernelTable, KVLayer
from rootlet.kernels.reference import ReferenceTable

NATIVE_PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """`attention`: name of the attention backend that fits `table`. `native`: linear layers and sampling are native. `can_record`: every op of
    the table records itself under graph capture. `reason`: a sentence for the log."""

    table: KernelTable
    attention: str
    native: bool
    can_record: bool
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
        self.add = native.add
        self.gather_rows = native.gather_rows
        self.sample = native.sample

    def store_kv(self, k: Tensor, v: Tensor, layer: KVLayer, out_cache_loc: Tensor) -> None:
        reference_attention.store_kv(k, v, layer, out_cache_loc)

    def attention(self, q: Tensor, layer: KVLayer, meta: AttentionMeta, scale: float, window: int | None = None) -> Tensor:
        return reference_attention.attention(q.contiguous(), layer, meta, scale, window)


def _native() -> tuple[KernelTable | None, str]:
    """The native table, or None and why there is none."""
    try:
        from rootlet.kernels.cpu.table import NativeTable
    except ImportError as error:
        return None, f"the native kernels are not built here ({error})"
    return NativeTable(), ""


def choose(wanted: str, *, page_size: int) -> KernelChoice:
    """`wanted`: auto | native | reference (--kernels). Raises `BadConfig` when native kernels were asked for and there are none."""
    if wanted == "reference":
        return KernelChoice(ReferenceTable(), "reference", False, False, "reference kernels, as asked for (--kernels reference): slow")
    native, why = _native()
    if native is None:
        if wanted == "native":
            raise BadConfig(f"--kernels native: {why}; install a C++17 compiler and reinstall, or use --kernels auto")
        return KernelChoice(ReferenceTable(), "reference", False, False, f"reference kernels, slow: {why}")
    if page_size not in NATIVE_PAGE_SIZES:
        sizes = ", ".join(map(str, NATIVE_PAGE_SIZES))
        return KernelChoice(
            PlainAttentionTable(native),
            "reference",
            True,
            False,
            f"native kernels with reference attention and no graph: --page-size {page_size} is none of {sizes}",
        )
    return KernelChoice(native, "cpu", True, True, f"{native.name} kernels")
