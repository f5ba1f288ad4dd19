"""`make bench-policies` in its pure parts: workloads of exact sizes, the fit of step costs, runs on a virtual clock, the table and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from rootlet.bench.instant import InstantExecutor
from rootlet.bench.policy_report import plot, table
from rootlet.bench.policy_runs import Outcome, Setup, SmallerPool, StepCosts, features, modelled, off_by, run
from rootlet.bench.policy_workloads import Job, PolicyWorkload, workloads
from rootlet.bench.sections import replace_section, with_section
from rootlet.core.clock import VirtualClock
from rootlet.core.step import Capacity, StepPlan
from rootlet.core.types import ForwardMode

LIKE = Capacity(num_pages=64, page_size=16, max_rows=8, max_context_len=512, max_step_tokens=512, vocab_size=100)


def encode(text: str) -> list[int]:
    return [4 + ord(char) % 90 for char in text]


def plan(prefix_lens: list[int], extend_lens: list[int]) -> StepPlan:
    rows, tokens = len(prefix_lens), sum(extend_lens)
    i32 = np.zeros(rows, dtype=np.int32)
    t32 = np.zeros(tokens, dtype=np.int32)
    lens = (np.array(prefix_lens, dtype=np.int32), np.array(extend_lens, dtype=np.int32))
    rids = tuple(map(str, range(rows)))
    return StepPlan(0, ForwardMode.MIXED, rids, i32, i32, *lens, np.ones(rows, dtype=np.bool_), t32, t32, t32)


@pytest.mark.parametrize("with_data", [False, True])
def test_workloads_have_the_same_sizes_with_and_without_data(tmp_path: Path, with_data: bool) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps({"question": "How many?"}) + "\n")
    shared, chunks, decodes = workloads(encode, tmp_path if with_data else None)
    assert [len(job.ids) for job in shared.jobs] == [440] * 25
    assert len({job.ids[:400] for job in shared.jobs}) == 5
    assert len({job.ids for job in shared.jobs}) == 25
    assert [sum(job.ids[:400] == head for job in shared.jobs) for head in {job.ids[:400] for job in shared.jobs}] == [5] * 5
    assert len({job.ids[:400] for job in shared.jobs[:5]}) > 2, "in no order"
    assert [len(job.ids) for job in chunks.jobs] == [840] * 8
    assert len({job.ids[:800] for job in chunks.jobs}) == 4
    assert {len(job.ids) for job in decodes.jobs} == {40}
    assert (min(job.max_new for job in decodes.jobs), max(job.max_new for job in decodes.jobs) > 100) == (8, True)


def test_features_by_hand() -> None:
    """A chunk of 10 behind 20, and decode rows that see 8 and 31: 10 tokens see 20 before and on average 5 of their own."""
    assert features(plan([20, 7, 30], [10, 1, 1])) == (1.0, 10.0, 250.0, 2.0, 39.0)


def test_the_fit_finds_the_prices_that_made_the_times() -> None:
    rng, costs = np.random.default_rng(0), StepCosts()
    prices = (0.004, 0.0002, 1e-7, 0.0, 2e-6)
    for _ in range(60):
        some = plan(
            [int(rng.integers(0, 400)), *rng.integers(1, 300, size=3).tolist()], [int(rng.integers(2, 200)), 1, 1, 1][: rng.integers(1, 5)] * 1
        )
        some = plan(some.prefix_lens[: len(some.extend_lens)].tolist(), some.extend_lens.tolist())
        costs.add(some, float(np.dot(prices, features(some))))
    assert costs.fit() == pytest.approx(prices, rel=1e-3, abs=1e-9)
    assert min(costs.fit()) >= 0.0, "no step earns time"


def test_a_run_on_a_virtual_clock_by_hand() -> None:
    """Two rows, one at a time, the same 32 tokens: a step costs a second. First: prefill, two decodes. Then: 16 of 32 are cached."""
    costs = StepCosts()
    for lengths in ([4], [1], [9], [1, 1]):
        costs.add(plan([3] * len(lengths), lengths), 1.0)
    work = PolicyWorkload("w", (Job(tuple(range(4, 36)), 3), Job(tuple(range(4, 36)), 3)), pool_len=128, max_running=1, chunk_len=64)
    outcome = modelled(work, Setup("fcfs", True, 16), LIKE, costs)
    assert (outcome.cached_len, outcome.computed_len) == (16, 48)
    assert outcome.ttft_s == pytest.approx((1.0, 4.0))
    assert outcome.tpot_s == pytest.approx((1.0, 1.0))
    assert outcome.total_s == pytest.approx(6.0)
    assert outcome.kv_peak == pytest.approx(3 / 8), "32 tokens and two more of 128"
    off = modelled(work, Setup("fcfs", False, 16), LIKE, costs)
    assert (off.cached_len, off.computed_len, off.retractions) == (0, 64, 0)


def test_a_smaller_pool_is_part_of_a_larger_one() -> None:
    costs = StepCosts()
    small = SmallerPool(InstantExecutor(LIKE), 128)
    assert (small.capacity.num_pages, small.capacity.page_size) == (8, 16)
    work = PolicyWorkload("w", tuple(Job(tuple(range(4 + i, 34 + i)), 40) for i in range(3)), pool_len=128, max_running=3, chunk_len=64)
    outcome = run(work, Setup("fcfs", True, 16), small, VirtualClock(), costs=costs)
    assert outcome.kv_peak <= 1.0
    assert len(costs.seconds) == len(costs.rows) > 40, "each step was noted"
    with pytest.raises(AssertionError, match="pool of 4096"):
        SmallerPool(InstantExecutor(LIKE), 4096)


def outcome(ttft_s: float) -> Outcome:
    return Outcome(10, 20, (ttft_s, 2 * ttft_s), (0.05,), 0.25, 0.5, 3, 9.0)


def test_the_models_error_is_a_median_of_ratios() -> None:
    assert off_by([outcome(1.0), outcome(2.0), outcome(4.0)], [outcome(1.1), outcome(2.0), outcome(2.0)]) == pytest.approx(0.1)


def test_table_and_plot_show_every_setup() -> None:
    policies, pages = ("fcfs", "lpm"), (1, 16)
    results = {("w", Setup(policy, cache, page)): outcome(page / 8) for policy in policies for cache in (True, False) for page in pages}
    lines = table(results, ["w"], policies, pages).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2] == "| w | fcfs | on | 10 · 10 | 20 · 20 | 0.19 · 3.00 | 0.24 · 3.90 | 50 · 50 | 25/50 · 25/50 | 3 · 3 |"
    root = ElementTree.fromstring(plot(results, ["w"], policies, 16))
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("width") == "16"]
    assert len(bars) == 4
    assert {float(bar.get("height", "0")) for bar in bars} == {round(190 * 3.0 / 3.9, 1)}


def test_a_section_is_replaced_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page = with_section("# Mine\n", "make x", "one")
    page = with_section(page + "by hand\n", "make y", "other")
    page = with_section(page, "make x", "two")
    assert page.startswith("# Mine\n")
    assert "by hand\n" in page
    assert "other" in page
    assert "two" in page
    assert "one" not in page
    path = tmp_path / "page.md"
    path.write_text(page)
    replace_section(path, "make y", "newer")
    assert path.read_text() == page.replace("other", "newer")
