"""What counts as reached over HTTP; the runs themselves are `make bench-http`."""

from __future__ import annotations

import pytest

from rootlet.bench.http_load import LOADS, verdict

BY_NAME = {load.name: load for load in LOADS}


@pytest.mark.parametrize(
    ("name", "runs", "reached"),
    [
        ("single", [{"tpot_p50": 0.0110}], True),  # 90.9 a second of 100
        ("single", [{"tpot_p50": 0.0112}], False),
        ("fewshot", [{"wall": 19.0}, {"wall": 25.0}, {"wall": 20.0}], True),
        ("fewshot", [{"wall": 20.1}], False),
        ("chat", [{"out_tok_s": 150.0}], True),
        ("chat", [{"out_tok_s": 149.0}], False),
        ("hot", [{"ttft_first": 3.0, "ttft_second": 0.08}], True),
        ("hot", [{"ttft_first": 3.0, "ttft_second": 0.081}], False),
        ("hot", [{"ttft_first": 1.0, "ttft_second": 0.04}], False),
    ],
)
def test_the_median_run_decides(name: str, runs: list[dict[str, float]], reached: bool) -> None:
    assert verdict(BY_NAME[name], runs, [90.0, 100.0, 110.0])[0] is reached
