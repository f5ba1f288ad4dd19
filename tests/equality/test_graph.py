"""A captured step equals the eager one to the bit, for every batch below the captured size; the arena reuses what is dead and nothing else."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from rootlet.core.errors import BadConfig
from rootlet.kernels import workspace
from rootlet.kernels.ops import Weight, empty

_native = pytest.importorskip("rootlet.kernels.cpu._native")
table_module = pytest.importorskip("rootlet.kernels.cpu.table")

TABLE = table_module.NativeTable()
HIDDEN, INNER, HEAD, VOCAB, MAX_TOKENS, MAX_ROWS = 96, 96, 16, 50, 40, 8
OUTLIER = 70  # a channel that makes its block stand out


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    TABLE.set_threads(2)
    yield
    TABLE.set_threads(2)


def random(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.3)


class TinyModel:
    """The shape of a decoder layer without attention: fused projections, slices, rope, residuals; a quantised and a float matrix."""

    def __init__(self, layers: int) -> None:
        self.embed = Weight("f32", VOCAB, HIDDEN, random(VOCAB, HIDDEN, seed=1))
        self.norm = random(HIDDEN, seed=2) + 1.0
        self.norm[OUTLIER] = 40.0
        self.cos_sin = random(64, HEAD, seed=3)
        blocks = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (2 * INNER, HIDDEN // 32 * 18), dtype=np.uint8))
        blocks.view(2 * INNER, -1, 18)[:, :, 1] = 0x20  # a scale that is a small normal number
        self.layers = [
            (
                Weight("q4_0", 2 * HIDDEN, HIDDEN, blocks[: 2 * HIDDEN]),
                Weight("f32", HIDDEN, HIDDEN, random(HIDDEN, HIDDEN, seed=10 + i)),
                Weight("q4_0", 2 * INNER, HIDDEN, blocks),
                Weight("bf16", HIDDEN, INNER, random(HIDDEN, INNER, seed=20 + i).bfloat16()),
            )
            for i in range(layers)
        ]
        self.head = Weight("f16", VOCAB, HIDDEN, random(VOCAB, HIDDEN, seed=5).half())

    def __call__(self, ids: Tensor, positions: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        x = TABLE.embedding(ids, self.embed)
        for qv, o, gate_up, down in self.layers:
            both = TABLE.linear(TABLE.rms_norm(x, self.norm, 1e-5), qv, normed=True)
            q, v = both[:, :HIDDEN], both[:, HIDDEN:]
            x = TABLE.linear(TABLE.rope(q, positions, self.cos_sin, HEAD, False), o, None, TABLE.linear(v, o, None, x))
            x = TABLE.linear(TABLE.silu_and_mul(TABLE.linear(TABLE.rms_norm(x, self.norm, 1e-5), gate_up, normed=True)), down, None, x)
        return x, TABLE.linear(TABLE.rms_norm(TABLE.gather_rows(x, rows), self.norm, 1e-5), self.head)


class Step:
    """Static inputs of a step and a graph captured over them at the largest size."""

    def __init__(self, layers: int = 2) -> None:
        self.model = TinyModel(layers)
        self.ids = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.rows = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self.graph = TABLE.new_graph()
        with self.graph.capture():
            self.hidden, self.logits = self.model(self.ids, self.positions, self.rows)

    def fill(self, tokens: int, rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.ids[:tokens] = torch.from_numpy(rng.integers(0, VOCAB, tokens).astype(np.int32))
        self.positions[:tokens] = torch.from_numpy(rng.integers(0, 64, tokens).astype(np.int32))
        self.rows[:rows] = torch.from_numpy(rng.integers(0, tokens, rows).astype(np.int32))

    def replay(self, tokens: int, rows: int) -> None:
        self.graph.replay(num_tokens=tokens, num_logit_rows=rows)

    def eager(self, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
        return self.model(self.ids[:tokens], self.positions[:tokens], self.rows[:rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_replay_equals_eager_at_every_size(threads: int) -> None:
    TABLE.set_threads(threads)
    step = Step()
    for seed, (tokens, rows) in enumerate([(1, 1), (2, 1), (3, 3), (4, 0), (5, 2), (17, 8), (MAX_TOKENS, MAX_ROWS), (1, 1)]):
        step.fill(tokens, rows, seed)
        step.replay(tokens, rows)
        hidden, logits = step.eager(tokens, rows)
        assert torch.equal(step.hidden[:tokens], hidden), f"hidden at {tokens} tokens"
        assert torch.equal(step.logits[:rows], logits), f"logits at {tokens} tokens, {rows} rows"


def test_counts_above_the_captured_size_are_refused_with_both_numbers() -> None:
    step = Step()
    with pytest.raises(ValueError, match=rf"num_tokens = {MAX_TOKENS + 1} is outside \[0, {MAX_TOKENS}\]"):
        step.replay(MAX_TOKENS + 1, 1)
    with pytest.raises(ValueError, match="num_logit_rows"):
        step.replay(1, MAX_ROWS + 1)
    with pytest.raises(ValueError, match="num_tokens = -1"):
        step.replay(-1, 1)


def test_the_tape_keeps_what_it_points_into() -> None:
    step = Step()
    step.fill(5, 2, 7)
    hidden, logits = step.eager(5, 2)
    step.model = None  # type: ignore[assignment]
    gc.collect()
    [torch.full((64 * 1024,), 7.0) for _ in range(20)]  # would land in freed weights
    step.replay(5, 2)
    assert torch.equal(step.hidden[:5], hidden)
    assert torch.equal(step.logits[:2], logits)


def test_memory_does_not_grow_with_layers() -> None:
    def arena_bytes(layers: int) -> int:
        tape = _native.Tape()
        model, ids, rows = TinyModel(layers), torch.zeros(MAX_TOKENS, dtype=torch.int32), torch.zeros(MAX_ROWS, dtype=torch.int32)
        with workspace.recording(tape) as record:
            model(ids, ids, rows)
        return record.arena.nbytes

    assert arena_bytes(2) == arena_bytes(8)


def test_a_view_keeps_its_buffer_from_reuse() -> None:
    with workspace.recording(_native.Tape()):
        first = empty(4, 8)
        view = first[:, 2:6]
        address = first.data_ptr()
        del first
        assert empty(4, 8).data_ptr() != address
        del view
        assert empty(4, 8).data_ptr() == address


def test_a_quantised_input_is_shared_by_the_linears_that_read_it() -> None:
    model, ids = TinyModel(1), torch.zeros(4, dtype=torch.int32)
    tape = _native.Tape()
    with workspace.recording(tape):
        x = TABLE.embedding(ids, model.embed)
        TABLE.linear(x, model.layers[0][0])
        TABLE.linear(x, model.layers[0][2])
        y = TABLE.rms_norm(x, model.norm, 1e-5)
        TABLE.linear(y, model.layers[0][2])
    names = [name for name, *_ in tape.profile()]
    assert names == ["embedding", "quantize", "gemm_q4_0", "gemm_q4_0", "gemm_q4_0"], "the norm is part of the last linear"


def test_what_a_merged_op_leaves_out_is_written_once_somebody_reads_it() -> None:
    """Norm, gate-up and silu keep their floats in cache; here every one of them has a second reader, or outlives the recording."""
    model, x = TinyModel(1), random(MAX_TOKENS, HIDDEN, seed=30)
    _, _, gate_up, _ = model.layers[0]
    down = Weight("q4_0", HIDDEN, INNER, gate_up.data[:HIDDEN].repeat(1, 2)[:, : INNER // 32 * 18].contiguous())  # type: ignore[index]

    def run() -> tuple[Tensor, ...]:
        y = TABLE.rms_norm(x, model.norm, 1e-5)
        g = TABLE.linear(y, gate_up)
        s = TABLE.silu_and_mul(g)
        out = TABLE.linear(s, down)
        return TABLE.silu_and_mul(y), TABLE.silu_and_mul(g), TABLE.silu_and_mul(s), out, g

    tape = _native.Tape()
    with workspace.recording(tape):
        recorded = run()
    names = [name for name, *_ in tape.profile()]
    assert names == ["gated_q4_0", "gemm_q4_0", *["silu_and_mul"] * 3]
    for threads in (1, 2, 3):
        TABLE.set_threads(threads)
        for rows in (MAX_TOKENS, 3, 1):
            for r in recorded:
                r.fill_(float("nan"))
            tape.replay(rows, 0)
            for i, (got, want) in enumerate(zip(recorded, run(), strict=True)):
                assert torch.equal(got[:rows], want[:rows]), f"output {i} at {rows} rows on {threads} threads"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_gated_linear_equals_its_parts_for_every_block_type(kind: str, normed: bool) -> None:
    block = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}[kind]
    data = torch.from_numpy(np.random.default_rng(6).integers(0, 256, (2 * INNER, HIDDEN // 32, block), dtype=np.uint8))
    data[:, :, 1] = 0x20
    if kind in ("q4_1", "q5_1"):
        data[:, :, 3] = 0x20
    gate_up = Weight(kind, 2 * INNER, HIDDEN, data.view(2 * INNER, -1))
    down = Weight(kind, HIDDEN, INNER, data[:HIDDEN].repeat(1, 2, 1)[:, : INNER // 32].reshape(HIDDEN, -1))
    bias, norm, x = random(2 * INNER, seed=7), random(HIDDEN, seed=8), random(MAX_TOKENS, HIDDEN, seed=9)
    norm[OUTLIER] = 40.0

    def run(rows: int) -> Tensor:
        y = TABLE.rms_norm(x[:rows], norm, 1e-5)  # alive, as in a model, so its int8 form's memory is not used again
        return TABLE.linear(TABLE.silu_and_mul(TABLE.linear(y, gate_up, bias, normed=normed)), down)

    run(1)  # packs the weights
    tops = TABLE.rms_norm(x, norm, 1e-5).view(MAX_TOKENS, -1, 32).abs().amax(-1)
    assert (tops > 2.5 * tops.mean(1, keepdim=True)).any(1).float().mean() > 0.5, "in most rows a block stands out"
    for isa in _native.usable_isas().split(","):
        _native.force_isa(isa)
        tape = _native.Tape()
        with workspace.recording(tape):
            out = run(MAX_TOKENS)
        assert len(tape) == 2
        for rows in (1, 2, 3, 4, 9, 33, MAX_TOKENS):
            tape.replay(rows, 0)
            assert torch.equal(out[:rows], run(rows)), f"{kind} {isa} {rows} rows"
    _native.force_isa("auto")


@pytest.mark.parametrize("after_norm", [False, True])
def test_an_input_in_one_plane_is_not_taken_for_one_in_two(after_norm: bool) -> None:
    """Linears read the same x, some of them as what a norm made; a norm that is part of the first one is read again by the others."""
    model, ids = TinyModel(1), torch.arange(MAX_TOKENS, dtype=torch.int32)
    assert model.embed.data is not None
    model.embed.data[::2, OUTLIER] = 30.0
    weight = model.layers[0][0]

    def run(rows: int) -> tuple[Tensor, ...]:
        x = TABLE.embedding(ids[:rows], model.embed)
        y = TABLE.rms_norm(x, model.norm, 1e-5) if after_norm else x
        return tuple(TABLE.linear(y, weight, normed=normed) for normed in (True, False, False, True))

    assert not torch.equal(run(1)[0], run(1)[1])
    tape = _native.Tape()
    with workspace.recording(tape):
        recorded = run(MAX_TOKENS)
    assert [name for name, *_ in tape.profile()].count("quantize") == (1 if after_norm else 2)
    for rows in (1, 2, 7, MAX_TOKENS):
        tape.replay(rows, 0)
        assert all(torch.equal(got[:rows], want) for got, want in zip(recorded, run(rows), strict=True))


def float_weight(n: int, k: int) -> Weight:
    return Weight("f32", n, k, random(n, k, seed=n))


def block_weight(n: int, k: int) -> Weight:
    blocks = torch.from_numpy(np.random.default_rng(n).integers(0, 256, (n, k // 32, 18), dtype=np.uint8))
    blocks[:, :, 1] = 0x20
    return Weight("q4_0", n, k, blocks.view(n, -1))


@pytest.mark.parametrize(("normed", "dead"), [(False, (96, 128, 12)), (True, (96, 128, 12)), (True, (96, 128, 24, 12))])
def test_a_gated_linear_does_not_write_where_its_inputs_are(normed: bool, dead: tuple[int, ...]) -> None:
    """Dead buffers of chosen widths make the arena put the floats of silu * mul where the int8 blocks of the norm were (its second plane in the third
    case). They are read later, so they must not be written while another worker, or another unit, still reads the blocks."""
    inner = 128
    gate_up, down, reader = block_weight(2 * inner, HIDDEN), block_weight(HIDDEN, inner), float_weight(HIDDEN, inner)
    x, norm = random(MAX_TOKENS, HIDDEN, seed=32), torch.ones(HIDDEN)
    norm[OUTLIER] = 40.0
    before, kept = [float_weight(n, HIDDEN) for n in dead], float_weight(16, HIDDEN)

    def run(rows: int) -> tuple[Tensor, Tensor]:
        buffers = [TABLE.linear(x[:rows], w) for w in before]
        spacer = TABLE.linear(x[:rows], kept)
        buffers.clear()
        g = TABLE.linear(TABLE.rms_norm(x[:rows], norm, 1e-5), gate_up, normed=normed)
        s = TABLE.silu_and_mul(g)
        del spacer
        return TABLE.linear(s, down), TABLE.linear(s, reader)

    run(1)
    tape = _native.Tape()
    with workspace.recording(tape):
        recorded = run(MAX_TOKENS)
    for rows in (MAX_TOKENS, 3, 1):
        tape.replay(rows, 0)
        for got, want in zip(recorded, run(rows), strict=True):
            assert torch.equal(got[:rows], want), f"{rows} rows"


def test_torch_arithmetic_under_capture_is_refused_views_are_not() -> None:
    x = torch.ones(4, 4)
    with workspace.recording(_native.Tape()):
        assert x[:, 1:].view(4, 3).shape == (4, 3)
        with pytest.raises(RuntimeError, match="under graph capture"):
            x * 2.0
        with pytest.raises(RuntimeError, match="under graph capture"):
            x.add_(1.0)
        with pytest.raises(RuntimeError, match="under graph capture"):
            x[0] = 1.0
        with pytest.raises(RuntimeError, match="under graph capture"):
            x.t().contiguous()
        with pytest.raises(RuntimeError, match="'item' under graph capture"):
            x[0, 0].item()
    assert torch.equal(x, torch.ones(4, 4))
    assert workspace.current() is None


def test_profile_times_each_op_only_while_on() -> None:
    step = Step(layers=1)
    step.replay(2, 1)
    assert all(t.calls == 0 for t in step.graph.times())
    step.graph.profile(on=True)
    step.replay(2, 1)
    step.replay(3, 1)
    step.graph.profile(on=False)
    step.replay(2, 1)
    times = step.graph.times()
    assert len(times) == step.graph.num_ops
    assert all(t.calls == 2 for t in times)
    assert times[0].name == "embedding"
    assert sum(t.seconds for t in times) > 0.0


def test_a_freed_graph_gives_its_memory_back_and_refuses_to_replay() -> None:
    step = Step()
    step.graph.free()
    with pytest.raises(AssertionError, match="freed"):
        step.replay(1, 1)


def test_two_python_threads_may_call_ops_at_once() -> None:
    model, x = TinyModel(1), random(6, HIDDEN, seed=3)
    expected = TABLE.linear(x, model.layers[0][2])
    wrong: list[int] = []

    def work(n: int) -> None:
        wrong.extend(n for _ in range(50) if not torch.equal(TABLE.linear(x, model.layers[0][2]), expected))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_forked_child_gets_a_team_of_its_own() -> None:
    model, x = TinyModel(1), random(6, HIDDEN, seed=3)
    expected = TABLE.linear(x, model.layers[0][0])
    pid = os.fork()
    if pid == 0:
        os._exit(0 if torch.equal(TABLE.linear(x, model.layers[0][0]), expected) else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(TABLE.linear(x, model.layers[0][0]), expected)


def test_pinning_holds_the_caller_only_during_a_step() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system has no CPU affinity")
    before = os.sched_getaffinity(0)
    TABLE.set_threads(2, pin=True)
    step = Step(layers=1)
    step.fill(3, 1, 1)
    step.replay(3, 1)
    assert os.sched_getaffinity(0) == before
    assert torch.equal(step.hidden[:3], step.eager(3, 1)[0])


def test_a_team_needs_a_thread() -> None:
    with pytest.raises(BadConfig, match="at least 1"):
        TABLE.set_threads(0)
    TABLE.set_threads(4, pin=True)  # more than the CPUs: not pinned, still right
    assert TABLE.num_threads() == 4
