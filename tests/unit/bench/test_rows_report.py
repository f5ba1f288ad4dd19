"""The report of the fault table: names to rows, outcomes to verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootlet.bench.rows import area_of, collect, rows_of, table

REPORT = """<testsuites><testsuite>
<testcase name="test_row_26_27_bad[a-b]"/><testcase name="test_row_26_27_bad[c]"><failure/></testcase>
<testcase name="test_row_07_ends"/><testcase name="test_row_07_more"><skipped/></testcase>
<testcase name="test_row_09_gone"><error/></testcase><testcase name="test_row_95_only_skipped"><skipped/></testcase>
<testcase name="test_other"><failure/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("name", "rows"), [("test_row_01_x", [1]), ("test_row_26_27_bad", [26, 27]), ("test_rows_1", []), ("test_row_x_1", [])])
def test_names_to_rows(name: str, rows: list[int]) -> None:
    assert rows_of(name) == rows


def test_areas() -> None:
    assert [area_of(n) for n in (1, 9, 16, 29, 32, 33, 69, 73, 86, 97)] == [
        *("STREAM", "TEMPLATE", "SAMPLING", "LOGPROB", "CTX", "CONN", "GGUF", "SAFETENSORS", "LIFE", "SEC"),
    ]


def test_one_failing_parameter_fails_the_row(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(REPORT)
    rows = collect(tmp_path / "r.xml")
    assert {n: row.verdict for n, row in rows.items()} == {26: "FAIL", 27: "FAIL", 7: "pass", 9: "FAIL", 95: "skip"}
    assert "| 7 | STREAM | pass | test_row_07_ends, test_row_07_more (skipped) |" in table(rows)
    assert "**test_row_09_gone**" in table(rows)
