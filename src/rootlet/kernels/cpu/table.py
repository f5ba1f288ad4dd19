"""The native kernel table: checks shapes, allocates outputs, hands addresses to the library. Contracts: `kernels/ops.py`; kernels: csrc/.

Importing this module raises `ImportError` where the library was not built. Attention and sampling live in their own files beside this one.
Outside capture an op runs at once on the thread team; under capture it appends itself to the tape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rootlet.core.errors import BadConfig, BadModelFile
from rootlet.device.cpu import CpuGraph
from rootlet.kernels import workspace
from rootlet.kernels.cpu import _native, attention_ops, sample_ops
from rootlet.kernels.ops import AttentionMeta, KVLayer, Weight, empty
from rootlet.kernels.workspace import FIXED, LOGIT_ROWS, TOKENS, Quantized

KINDS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
"""Weight kinds in the library's order (csrc/include/rootlet/tensor_args.h)."""

FLOAT_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
QUANT_BLOCK = 32
SCALE_BYTES = 16  # of one quantised block of activations (ActScale in csrc/include/rootlet/tensor_args.h)


def _check_rows(name: str, x: Tensor) -> None:
    fits = x.dtype == torch.float32 and x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1)
    assert fits, f"{name} must be float32 [rows, features] with contiguous rows, got {x.dtype} {tuple(x.shape)} strides {x.stride()}"


def _check_index(name: str, ids: Tensor) -> None:
    fits = ids.dtype == torch.int32 and ids.dim() == 1 and ids.is_contiguous()
    assert fits, f"{name} must be a contiguous int32 vector, got {ids.dtype} {tuple(ids.shape)}"


def _check_vector(name: str, v: Tensor, n: int) -> None:
    fits = v.dtype == torch.float32 and v.is_contiguous() and v.numel() == n
    assert fits, f"{name} must be contiguous float32 [{n}], got {v.dtype} {tuple(v.shape)}"


def _recorded(x: Tensor, *kept: Any) -> tuple[Any, int]:
    """(tape or None, row space of x); under capture whatever the tape will point into is kept alive with it."""
    record = workspace.current()
    if record is None:
        return None, FIXED
    record.keep(x, *kept)
    record.read(x, *kept)
    return record.tape, record.space(x)


def _out(rows: int, n: int, space: int) -> Tensor:
    out = empty(rows, n)
    record = workspace.current()
    if record is not None and space != TOKENS:
        record.set_space(out, space)
    return out


def _quantize(x: Tensor, *, normed: bool) -> Quantized:
    """x [T, K] -> its int8 form, shared by all linears of one capture that read the same x. `normed`: with a second plane."""
    record = workspace.current()
    found = None if record is None else record.quantized(x, normed=normed)
    if found is not None:
        return found
    rows, k = x.shape
    tape, space = (None, FIXED) if record is None else (record.tape, record.space(x))
    q = empty(rows, k, dtype=torch.int8)
    low = empty(rows, k, dtype=torch.int8) if normed else None
    scales = empty(rows * (k // QUANT_BLOCK) * SCALE_BYTES, dtype=torch.uint8)
    elided = _native.quantize(tape, x.data_ptr(), x.stride(0), q.data_ptr(), _address(low), scales.data_ptr(), rows, space, k)
    made = Quantized(q, low, scales)
    if record is not None:
        record.set_space(q, space)
        record.keep(x)
        if elided is None:
            record.read(x)
        else:
            record.elide(elided)
        record.set_quantized(x, made, normed=normed)
    return made


class NativeTable:
    """Satisfies `KernelTable`. Stateless; the team and the instruction set are the process's."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return f"native ({_native.current_isa()})"

    # ---- the process's team and graphs

    def new_graph(self) -> CpuGraph:
        """An empty graph that ops of this table can be captured in."""
        return CpuGraph(_native.Tape(), workspace.recording)

    def set_threads(self, size: int, *, pin: bool | None = None) -> None:
        """Replaces the kernel team: `size` threads including the caller. Waits for a running op. `pin` ties each to a CPU of its own when there are
        enough (the caller only while a graph is replayed); None = when the team takes all CPUs, where it matters and disturbs no other team."""
        if size < 1:
            raise BadConfig(f"the kernel team needs at least 1 thread, got {size} (--threads)")
        _native.set_team(size, size == _native.num_usable_cpus() if pin is None else pin)

    def num_threads(self) -> int:
        return int(_native.team_size())

    # ---- linear layers

    def prepare_linear(self, w: Weight) -> None:
        """Repacks `w.data`, which may be dropped afterwards. Raises `BadModelFile` on an unknown kind or a K that is no multiple of 32."""
        if w.packed is not None:
            return
        if w.kind not in KINDS:
            raise BadModelFile(f"weight type {w.kind!r} has no native kernel (known: {', '.join(KINDS)})")
        kind = KINDS.index(w.kind)
        if w.kind not in FLOAT_DTYPES and w.k % QUANT_BLOCK:
            raise BadModelFile(f"a {w.kind} weight of {w.k} input features: must be a multiple of {QUANT_BLOCK}")
        data = self._checked_data(w, kind)
        w.packed = _native.pack(kind, w.n, w.k, data.data_ptr())

    @staticmethod
    def _checked_data(w: Weight, kind: int) -> Tensor:
        assert w.data is not None, "the weight's data was dropped before it was packed"
        data = w.data.contiguous()
        dtype = FLOAT_DTYPES.get(w.kind, torch.uint8)
        nbytes, expected = data.numel() * data.element_size(), w.n * _native.row_bytes(kind, w.k)
        fits = data.dtype == dtype and nbytes == expected
        assert fits, f"{w.kind} [{w.n}, {w.k}] held as {data.dtype} {tuple(data.shape)}: {nbytes} bytes, not {expected}"
        return data

    def linear(self, x: Tensor, w: Weight, bias: Tensor | None = None, residual: Tensor | None = None, *, normed: bool = False) -> Tensor:
        """x and residual may be slices of wider matrices; the result is dense. Packs `w` on first use if nobody did."""
        _check_rows("x", x)
        assert x.shape[1] == w.k, f"x of {x.shape[1]} features times a weight of {w.k}"
        if w.packed is None:
            self.prepare_linear(w)
        if bias is not None:
            _check_vector("bias", bias, w.n)
        if residual is not None:
            _check_rows("residual", residual)
            assert residual.shape == (x.shape[0], w.n), f"residual {tuple(residual.shape)} onto [{x.shape[0]}, {w.n}]"
        source, low, scales = (x, None, None) if w.kind in FLOAT_DTYPES else _quantize(x, normed=normed)
        tape, space = _recorded(source, w.packed, bias, residual)
        out = _out(x.shape[0], w.n, space)
        _native.gemm(
            tape, w.packed, source.data_ptr(), source.stride(0), _address(low), _address(scales), _address(bias), _address(residual),
            0 if residual is None else residual.stride(0), out.data_ptr(), x.shape[0], space,
        )  # fmt: skip
        return out

    # ---- the rest

    def embedding(self, ids: Tensor, w: Weight) -> Tensor:
        _check_index("ids", ids)
        data = self._checked_data(w, KINDS.index(w.kind))
        tape, space = _recorded(ids, data)
        out = _out(ids.shape[0], w.k, space)
        _native.embedding(tape, KINDS.index(w.kind), ids.data_ptr(), data.data_ptr(), out.data_ptr(), ids.shape[0], space, w.n, w.k)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, heads=1)

    def head_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, heads=x.shape[1] // weight.shape[0])

    def _norm(self, x: Tensor, weight: Tensor, eps: float, *, heads: int) -> Tensor:
        _check_rows("x", x)
        n = weight.shape[0]
        _check_vector("weight", weight, n)
        assert x.shape[1] == heads * n, f"x of {x.shape[1]} features in {heads} heads of {n}"
        tape, space = _recorded(x, weight)
        out = _out(x.shape[0], x.shape[1], space)
        _native.rms_norm(tape, x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), x.shape[0], space, heads, n, eps)
        return out

    def rope(self, x: Tensor, positions: Tensor, cos_sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
        """`positions` may be longer than x; a position beyond the table gives a row of NaN."""
        _check_rows("x", x)
        _check_index("positions", positions)
        max_len, rotary_dim = cos_sin.shape
        _check_vector("cos_sin", cos_sin, max_len * rotary_dim)
        fits = x.shape[1] % head_dim == 0 and rotary_dim % 2 == 0 and rotary_dim <= head_dim
        assert fits, f"rope of {rotary_dim} dimensions in heads of {head_dim}, x of {x.shape[1]}"
        assert positions.shape[0] >= x.shape[0], f"{positions.shape[0]} positions for {x.shape[0]} rows"
        tape, space = _recorded(x, positions, cos_sin)
        out = _out(x.shape[0], x.shape[1], space)
        _native.rope(
            tape, x.data_ptr(), x.stride(0), positions.data_ptr(), cos_sin.data_ptr(), out.data_ptr(), x.shape[0], space,
            x.shape[1] // head_dim, head_dim, rotary_dim, max_len, interleaved,
        )  # fmt: skip
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        _check_rows("gate_up", gate_up)
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.shape[1] == 2 * n, f"gate_up of {gate_up.shape[1]} features: gate and up must be of one size"
        tape, space = _recorded(gate_up)
        out = _out(rows, n, space)
        _native.silu_and_mul(tape, gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, space, n)
        return out

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Under capture the result counts logit rows, and so does all that is made of it."""
        _check_rows("x", x)
        _check_index("rows", rows)
        tape, _ = _recorded(x, rows)
        space = FIXED if tape is None else LOGIT_ROWS
        out = _out(rows.shape[0], x.shape[1], space)
        _native.gather_rows(tape, x.data_ptr(), x.stride(0), rows.data_ptr(), out.data_ptr(), rows.shape[0], space, x.shape[1], x.shape[0])
        return out

    # ---- attention and sampling

    def store_kv(self, k: Tensor, v: Tensor, layer: KVLayer, out_cache_loc: Tensor) -> None:
        _recorded(k, v, layer.k, layer.v, layer.k_scales, layer.v_scales, out_cache_loc)
        attention_ops.store_kv(k, v, layer, out_cache_loc)

    def attention(self, q: Tensor, layer: KVLayer, meta: AttentionMeta, scale: float, window: int | None = None) -> Tensor:
        _recorded(q, layer.k, layer.v, layer.k_scales, layer.v_scales, meta)
        return attention_ops.attention(q, layer, meta, scale, window)

    def sample(self, logits: Tensor, state: Any) -> None:
        _recorded(logits, state)
        sample_ops.sample(logits, state)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else int(x.data_ptr())
