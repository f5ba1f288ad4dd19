"""The record of a `make bench` run -> its part of docs/benchmarks.md, between two marks. The rest of the page is written by hand and kept."""

from __future__ import annotations

from typing import Any

BEGIN = "<!-- make bench writes from here -->\n"
END = "<!-- to here -->\n"


def render(record: dict[str, Any], page: str) -> str:
    """`page` with the generated part replaced; a page without marks gets it at its end."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{_section(record)}{END}{after}"


def _section(record: dict[str, Any]) -> str:
    rows = "\n".join(_row(r) for r in record["results"])
    return f"""
## Beside llama.cpp

`make bench` on {record["date"]}, {record["machine"]}; load average at the end {record["load"][0]} (other work disturbs: only ratios count).

- Model file {record["file"]}, {record["threads"]} threads, KV {record["kv_dtype"]}, {record["rounds"]} rounds, medians.
- Limits that this run saw: {record["integer_gmacs"]} G int8 multiply-adds/s, {record["read_gbytes"]} GB/s read. The slowest calibration was
  {record["slowest_over_fastest"]:.0%} of the fastest.
- Ours is the whole runtime in one process, sampling and detokenising included; llama.cpp computes tokens only. "Q4_0" is the same file requantised
  by llama.cpp, its fastest type.

| workload | ours tok/s (min-max) | llama.cpp, same file | ratio | llama.cpp, Q4_0 | ratio | % of bandwidth | % of integer peak |
|---|---|---|---|---|---|---|---|
{rows}

"""


def _row(r: dict[str, Any]) -> str:
    low, high = r["ours_range"]
    return (
        f"| {r['name']} | {r['ours']:.0f} ({low:.0f}-{high:.0f}) | {r['same_file']:.0f} | {r['ratio_same_file']:.2f}x "
        f"| {r['best_type']:.0f} | {r['ratio_best_type']:.2f}x | {r['percent_of_bandwidth']:.0f} | {r['percent_of_integer_peak']:.0f} |"
    )
