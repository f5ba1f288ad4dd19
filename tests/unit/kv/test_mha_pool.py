"""The KV pool: shapes of both layouts, sizes, a zero sink, and pages that cost nothing until they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fixtures.attention_cases import config
from rootlet.core.errors import BadConfig
from rootlet.kv.mha import MHATokenToKVPool, kv_bytes_per_token
from rootlet.kv.pool import lazy_zeros


def test_both_layouts_hold_the_same_tokens() -> None:
    cfg = config(4, 2, 24, num_layers=3)
    blocked = MHATokenToKVPool(cfg, num_pages=5, page_size=32, dtype=torch.float16)
    plain = MHATokenToKVPool(cfg, num_pages=5, page_size=7, dtype=torch.float32, layout="plain")
    assert blocked.num_layers == plain.num_layers == 3
    assert (blocked.layer(0).k.shape, blocked.layer(0).v.shape) == ((6, 2, 2, 24, 16), (6, 2, 32, 24))
    assert plain.layer(2).k.shape == plain.layer(2).v.shape == (6, 2, 7, 24)
    assert (blocked.layer(1).k.dtype, plain.layer(1).v.dtype) == (torch.float16, torch.float32)
    assert kv_bytes_per_token(cfg, torch.float16) == 2 * 3 * 2 * 24 * 2
    assert blocked.num_bytes == kv_bytes_per_token(cfg, torch.float16) * 6 * 32
    stored = sum(t.numel() * t.element_size() for i in range(3) for t in (plain.layer(i).k, plain.layer(i).v))
    assert plain.num_bytes == stored


def test_layers_do_not_overlap_and_start_at_zero() -> None:
    pool = MHATokenToKVPool(config(1, 1, 8, num_layers=2), num_pages=1, page_size=16, dtype=torch.float32)
    planes = [t for i in range(2) for t in (pool.layer(i).k, pool.layer(i).v)]
    assert not any(t.any() for t in planes)
    for i, t in enumerate(planes):
        t.fill_(i + 1)
    assert [float(t.unique()) for t in planes] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"page_size": 20}, "page size 20 does not fit KV layout blocked"),
        ({"page_size": 0, "layout": "plain"}, "page size 0"),
        ({"page_size": 16, "layout": "rows"}, "got 'rows'"),
        ({"page_size": 16, "dtype": torch.bfloat16}, "bfloat16"),
        ({"page_size": 16, "num_pages": 0}, "at least 1 page, got 0"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_its_number(kwargs: dict[str, object], match: str) -> None:
    with pytest.raises(BadConfig, match=match):
        MHATokenToKVPool(config(1, 1, 8), **{"num_pages": 1, **kwargs})  # type: ignore[arg-type]


def test_untouched_memory_is_not_resident() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc")
    before = int(statm.read_text().split()[1])
    memory = lazy_zeros(1 << 30)
    memory[12345] = 1
    grown = (int(statm.read_text().split()[1]) - before) * 4096
    assert memory.shape == (1 << 30,)
    assert grown < 64 << 20
