"""The word auto becomes a value once, with a reason; knobs that contradict each other are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rootlet.config.load import load_config
from rootlet.config.resolve import num_usable_cores, resolve_config
from rootlet.core.errors import BadConfig


@pytest.mark.parametrize(("num_cores", "depth", "detokenizer"), [(1, "1", "inline"), (2, "1", "inline"), (3, "2", "process"), (64, "2", "process")])
def test_auto_follows_the_cores(num_cores: int, depth: str, detokenizer: str) -> None:
    config, reasons = resolve_config(load_config({}, {}, None)[0], num_cores=num_cores)
    assert (config.scheduler.depth, config.server.detokenizer) == (depth, detokenizer)
    assert set(reasons) == {"depth", "detokenizer", "device"}
    assert config.compute.device == "cpu"
    assert str(num_cores) in reasons["depth"]


def test_what_the_user_chose_stays() -> None:
    config, reasons = resolve_config(load_config({"depth": "2", "detokenizer": "inline", "device": "cpu"}, {}, None)[0], num_cores=1)
    assert (config.scheduler.depth, config.server.detokenizer, reasons) == ("2", "inline", {})


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"chunked_prefill": 8, "page_size": 16}, "--chunked-prefill 8"),
        ({"page_size": 24}, "power of two"),
        (
            {"page_size": 64, "max_total_tokens": 63},
            "--max-total-tokens 63 is smaller than --page-size 64: .* at least one page; give --max-total-tokens 64",
        ),
        ({"record": "/no such folder/record"}, "--record /no such folder/record: there is no folder"),
        ({"mem": "lots"}, "--mem"),
        ({"mem": "0"}, "--mem"),
        ({"mem": "nan"}, "--mem"),
        ({"kv_events": "127.0.0.1:5557"}, "--kv-events must be an endpoint"),
        ({"kv_events": "tcp://127.0.0.1:99999"}, "--kv-events must be an endpoint"),
        ({"kv_events": "tcp://127.0.0.1"}, "--kv-events must be an endpoint"),
        ({"kv_events": "ipc:///x", "kv_events_replay": "udp://x:1"}, "--kv-events-replay must be an endpoint"),
        ({"kv_events": "ipc:///x", "kv_events_replay": "ipc:///x"}, "cannot both be ipc:///x"),
        ({"kv_events_replay": "ipc:///x"}, "need --kv-events"),
        ({"kv_events_topic": "x"}, "need --kv-events"),
        ({"device": "cuda"}, "--device cuda is not there yet; use auto or cpu"),
    ],
)
def test_contradictions_are_refused(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(BadConfig, match=word):
        resolve_config(load_config(flags, {}, None)[0], num_cores=2)


def test_a_pool_of_one_page_is_taken() -> None:
    assert resolve_config(load_config({"page_size": 64, "max_total_tokens": 64}, {}, None)[0], num_cores=2)[0].cache.max_total_tokens == 64


def test_at_least_one_core() -> None:
    assert num_usable_cores() >= 1
