"""The KV sum: which rule wins, what is refused, and that the lines say the numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rootlet.config.model import ModelConfig, RopeConfig
from rootlet.config.schema import CacheArgs, ModelArgs, RuntimeConfig, SchedulerArgs
from rootlet.core.errors import BadConfig
from rootlet.runner.capacity import GIB, available_bytes, max_step_tokens, plan_memory, token_workspace_bytes

MODEL = ModelConfig(
    arch="llama",
    family="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_context_len=256,
    rms_eps=1e-5,
    rope=RopeConfig("default", 10000.0, 16),
    tie_embeddings=True,
)


def config(*, mem: str = "auto", tokens: int | None = None, page_size: int = 16, running: int = 4, ctx: int | None = None) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelArgs(ctx_len=ctx),
        cache=CacheArgs(mem=mem, max_total_tokens=tokens, page_size=page_size),
        scheduler=SchedulerArgs(max_running=running),
    )


def test_small_model_on_a_big_box_takes_only_what_its_rows_can_fill() -> None:
    plan = plan_memory(config(), MODEL, available=64 * GIB, weights=0, token_bytes=256)
    assert plan.capacity.pool_len == 4 * 256
    assert "--max-running" in plan.lines[1]


def test_auto_takes_a_quarter_of_what_is_left() -> None:
    plan = plan_memory(config(running=4096), MODEL, available=1 * GIB, weights=0, token_bytes=1024)
    assert plan.kv_bytes == pytest.approx(0.25 * (1 * GIB - 256 * 2**20), rel=0.08)
    assert plan.kv_bytes == (plan.capacity.num_pages + 1) * 16 * 1024


def test_mem_and_max_total_tokens_override() -> None:
    assert plan_memory(config(mem="0.5"), MODEL, available=4 * GIB, weights=0, token_bytes=1024).capacity.pool_len == GIB // 2 // 1024
    assert plan_memory(config(mem="0.5", tokens=333), MODEL, available=4 * GIB, weights=0, token_bytes=1024).capacity.num_pages == 333 // 16


def test_too_much_is_refused_with_the_sum() -> None:
    with pytest.raises(BadConfig, match=r"--mem 8.*available.*lower --max-total-tokens or --mem"):
        plan_memory(config(mem="8"), MODEL, available=4 * GIB, weights=0, token_bytes=1024)
    with pytest.raises(BadConfig, match="--mem must be auto"):
        plan_memory(config(mem="lots"), MODEL, available=4 * GIB, weights=0, token_bytes=1024)


def test_a_pool_without_a_page_is_refused_with_the_knob_that_gives_one() -> None:
    with pytest.raises(BadConfig, match=r"0 tokens.*one page of --page-size 16 \(16384 bytes\).*-1\.\d+ GiB left; lower --ctx-len.*--max-running"):
        plan_memory(config(), MODEL, available=GIB, weights=2 * GIB, token_bytes=1024)
    for asked, knob in (({"mem": "1e-5"}, "--mem"), ({"tokens": 16}, "--max-total-tokens")):
        with pytest.raises(
            BadConfig, match=rf"{knob} {asked.get('mem', 16)} gives a KV pool of 1[06] tokens, less than one page of --page-size 64"
        ) as caught:
            plan_memory(config(page_size=64, **asked), MODEL, available=4 * GIB, weights=0, token_bytes=1024)
        advice = re.search(rf"give {knob} (\S+) or more", caught.value.message)
        assert advice is not None
        better = config(page_size=64, mem=advice[1]) if knob == "--mem" else config(page_size=64, tokens=int(advice[1]))
        assert plan_memory(better, MODEL, available=4 * GIB, weights=0, token_bytes=1024).capacity.num_pages >= 1


def test_context_is_the_models_unless_asked_for_less() -> None:
    assert plan_memory(config(ctx=100), MODEL, available=4 * GIB, weights=0, token_bytes=256).capacity.max_context_len == 100
    with pytest.raises(BadConfig, match="--ctx-len 300"):
        plan_memory(config(ctx=300), MODEL, available=4 * GIB, weights=0, token_bytes=256)


def test_slots_stay_within_int32() -> None:
    plan = plan_memory(config(tokens=2**33), MODEL, available=2**40, weights=0, token_bytes=1)
    assert 2**31 - 64 < (plan.capacity.num_pages + 1) * 16 <= 2**31 - 1


def test_largest_step_shrinks_with_the_memory() -> None:
    big = replace(MODEL, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128)
    assert max_step_tokens(config(), MODEL, 64 * GIB) == 8192 + 4
    assert max_step_tokens(config(), big, 8 * GIB) == int(8 * GIB * 0.1) // token_workspace_bytes(big) + 4
    assert max_step_tokens(config(), big, 0) == 512 + 4


def test_control_group_limits_what_is_available(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_bytes(tmp_path) == 3000
    (tmp_path / "memory.current").write_text("6000\n")
    assert available_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 3000
