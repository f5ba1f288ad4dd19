"""Tensors of a file -> weights of a model: the one loader for GGUF and safetensors.

It is the `WeightSource` that layers ask while they are constructed (layers/weights.py): it finds the tensors, checks their shapes, converts what
has no kernel, joins rows of fused matrices, and packs them for the kernel table. Nothing is guessed: what is missing, has another shape, or is left
over is collected, and `finish` refuses the file, naming all of it. Reading bytes is the job of `formats`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from rootlet.core.errors import BadModelFile
from rootlet.formats.gguf_weights import GGUFWeights
from rootlet.formats.tensor import PLAIN_DTYPES, RawTensor, WeightFile
from rootlet.kernels.ops import KernelTable, Weight
from rootlet.loader.convert import DTYPE_KINDS, join_rows, to_float32, with_kernel
from rootlet.quant.gguf_blocks import DENSE_DTYPES

# Tensors that a checkpoint may hold although no model needs them: buffers that are computed, and a head that is tied to the embedding.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$|^lm_head\.weight$")
NAMES_SHOWN = 8


class FileWeights:
    """Satisfies `WeightSource` over one open file. Call `finish` once the model is constructed; before that nothing may be served."""

    def __init__(
        self,
        file: WeightFile,
        table: KernelTable,
        *,
        label: str,
        dtype: str = "auto",
        progress: Callable[[float, str], None] = lambda done, name: None,
    ) -> None:
        """`label`: the file's name in messages. `dtype`: what matrices are converted to ("auto" = stay as they are).
        `progress(done in [0, 1], tensor name)`. `kinds` counts the matrices as they are held, `num_bytes` what they take."""
        self._file = file
        self._label = label
        self._table = table
        self._dense_kind = DTYPE_KINDS.get(dtype)
        self._progress = progress
        self._unused = dict.fromkeys(file.names())
        self._num_tensors = max(1, len(self._unused))
        self._problems: list[str] = []
        self._notes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.num_bytes = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What was converted, for the log: "12 x q4_k -> q8_0"."""
        return tuple(f"{n} x {what}" for what, n in sorted(self._notes.items()))

    def matrix(self, names: tuple[str, ...], rows: tuple[int, ...], *, cols: int) -> Weight:
        parts = [self._kept(raw) for name, n in zip(names, rows, strict=True) if (raw := self._take(name, (n, cols))) is not None]
        if len(parts) < len(names):
            return Weight("f32", sum(rows), cols, None)
        weight = join_rows(parts, note=self._note)
        self._table.prepare_linear(weight)
        self._count(weight)
        if weight.packed is not None:
            weight.data = None
        return weight

    def table(self, name: str, *, rows: int, cols: int, also_linear: bool) -> Weight:
        raw = self._take(name, (rows, cols))
        if raw is None:
            return Weight("f32", rows, cols, None)
        weight = self._kept(raw)
        if also_linear:
            self._table.prepare_linear(weight)
        self._count(weight)
        return weight

    def vector(self, names: tuple[str, ...], rows: tuple[int, ...]) -> Tensor:
        parts = [to_float32(raw).clone() for name, n in zip(names, rows, strict=True) if (raw := self._take(name, (n,))) is not None]
        return torch.cat(parts) if len(parts) == len(names) else torch.empty(sum(rows))

    def finish(self) -> None:
        """Raises `BadModelFile` that names every tensor that was missing, misshapen, or not asked for."""
        extra = [name for name in self._unused if not IGNORED.search(name)]
        extra += self._file.unknown if isinstance(self._file, GGUFWeights) else ()
        self._problems += [f"{name}: the model has no place for it" for name in extra]
        if self._problems:
            shown = "; ".join(self._problems[:NAMES_SHOWN])
            more = len(self._problems) - NAMES_SHOWN
            raise BadModelFile(f"{self._label}: {shown}" + (f"; and {more} more" if more > 0 else ""))

    def _take(self, name: str, shape: tuple[int, ...]) -> RawTensor | None:
        """The tensor, or None after noting what is wrong with it."""
        if name not in self._unused:
            self._problems.append(f"{name} {list(shape)}: missing")
            return None
        del self._unused[name]
        self._progress(1.0 - len(self._unused) / self._num_tensors, name)
        found = self._file.shape(name)
        if found != shape:
            self._problems.append(f"{name}: shape {list(found)}, the model's configuration asks for {list(shape)}")
            return None
        raw = self._file.get(name)
        if raw.kind in PLAIN_DTYPES and raw.kind not in DENSE_DTYPES:
            self._problems.append(f"{name}: type {raw.kind}, which is no type of weights; served are {', '.join(DENSE_DTYPES)} and GGUF blocks")
            return None
        return raw

    def _kept(self, raw: RawTensor) -> Weight:
        return with_kernel(raw, dense_kind=self._dense_kind, note=self._note)

    def _note(self, what: str) -> None:
        self._notes[what] += 1

    def _count(self, weight: Weight) -> None:
        assert weight.data is not None
        self.kinds[weight.kind] += 1
        held = weight.packed if isinstance(weight.packed, Tensor) else weight.data
        self.num_bytes += held.numel() * held.element_size()
