"""The bench driver's arithmetic: ratios, percents of limits, the page that keeps its hand-written part, and what counts as a loss."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.attention_cases import config
from rootlet.bench.calibration import Limits
from rootlet.bench.compare import judge, regressions
from rootlet.bench.limits import layer_macs, step_cost
from rootlet.bench.report import BEGIN, END, render
from rootlet.bench.workloads import Workload


def work(batch: int, context: int, *, prefill: bool = False) -> Workload:
    return Workload("w", batch, context, prefill, lambda: 0.0, lambda peer: 0.0)


def record(**ratios: float) -> dict[str, Any]:
    shared = {"ours": 10.0, "ours_range": (9.0, 11.0), "same_file": 5.0, "best_type": 5.0, "ratio_same_file": 2.0}
    percents = {"percent_of_bandwidth": 50.0, "percent_of_integer_peak": 3.0}
    results = [{"name": name, "ratio_best_type": ratio, **shared, **percents} for name, ratio in ratios.items()]
    head = {"date": "today", "machine": "m", "load": [0.1, 0, 0], "file": "f", "threads": 2, "kv_dtype": "float16", "rounds": 3}
    return head | {"integer_gmacs": 1.0, "read_gbytes": 2.0, "slowest_over_fastest": 0.5, "results": results}


def test_a_decode_step_reads_all_weights_and_each_rows_kv() -> None:
    cfg = config(num_heads=4, num_kv_heads=2, head_dim=8, num_layers=3)  # hidden 32, inner 8, vocabulary 16
    assert layer_macs(cfg) == 3 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 8)
    cost = step_cost(cfg, work(5, 100), weights_bytes=1000, kv_dtype="float16")
    assert cost.tokens == 5
    assert cost.num_bytes == 1000 + 5 * 100 * (2 * 3 * 2 * 8 * 2)
    assert cost.linear_macs == 5 * layer_macs(cfg) + 5 * 16 * 32
    assert step_cost(cfg, work(1, 0, prefill=True), weights_bytes=1000, kv_dtype="int8").tokens == 512


def test_results_are_ratios_of_medians_and_percents_of_limits() -> None:
    cost = step_cost(config(4, 2, 8), work(2, 0), weights_bytes=1000, kv_dtype="float16")
    result = judge(work(2, 0), ([40.0, 100.0, 60.0], [30.0], [20.0, 10.0, 90.0]), cost, Limits(cost.linear_macs * 300.0, 60_000.0))
    assert (result.ours, result.ours_range, result.ratios) == (60.0, (40.0, 100.0), (2.0, 3.0))
    assert result.percent_of_bandwidth == 50.0, "30 steps a second of 1000 bytes"
    assert result.percent_of_integer_peak == 10.0


def test_the_page_keeps_what_people_wrote() -> None:
    first = render(record(a=2.0), "# Mine\n")
    page = render(record(a=3.0, b=1.5), first + "\nThe trick with mirrors: 3 % slower.\n")
    assert page.startswith("# Mine\n")
    assert page.endswith("\nThe trick with mirrors: 3 % slower.\n")
    assert (page.count(BEGIN), page.count(END)) == (1, 1)
    assert "3.00x" in page
    assert "2.00x | 50" not in page, "the old ratio is gone"
    assert "| b |" in page


@pytest.mark.parametrize(("now", "lost"), [(1.71, []), (1.69, ["a: 1.69x, recorded 2.00x"])])
def test_only_a_loss_beyond_the_tolerance_counts(now: float, lost: list[str]) -> None:
    assert regressions(record(a=now, new=0.1), record(a=2.0), 0.15) == lost
