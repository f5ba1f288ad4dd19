"""docs/cache-rows.md says which test keeps which known fault of prefix caches away: nothing missing, nothing invented."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NUM_ROWS = 60
TEST = re.compile(r"`([a-z_/0-9]+\.py)::(\w+)`")


def table() -> dict[int, str]:
    """Row -> its last cell."""
    lines = (ROOT / "docs" / "cache-rows.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ \|", line)]
    assert all(len(row) == 4 for row in cells)
    return {int(row[0]): row[3] for row in cells}


def rows_of(name: str) -> list[int]:
    """The rows that a test carries in its name: test_row_12_..., test_rows_07_and_08_..."""
    numbers = re.match(r"test_rows?_((?:\d\d_(?:and_)?)+)", name)
    return [] if numbers is None else [int(number) for number in re.findall(r"\d\d", numbers[1])]


def test_every_row_has_a_test_that_exists_or_a_reason() -> None:
    rows = table()
    assert sorted(rows) == list(range(1, NUM_ROWS + 1))
    for row, cell in rows.items():
        tests = TEST.findall(cell)
        assert tests or cell.startswith("not yet: "), f"row {row} has neither a test nor a reason"
        for path, name in tests:
            assert f"def {name}(" in (ROOT / "tests" / path).read_text(), f"row {row}: there is no {path}::{name}"
            assert row in rows_of(name) or not path.startswith("unit/cache/"), f"{name} is not of row {row}"


def test_every_test_of_a_row_stands_in_the_table() -> None:
    rows, found = table(), 0
    for path in sorted((ROOT / "tests" / "unit" / "cache").glob("test_*.py")):
        for name in re.findall(r"^def (test_rows?_\d\w+)\(", path.read_text(), re.MULTILINE):
            for row in rows_of(name):
                assert f"`unit/cache/{path.name}::{name}`" in rows[row], f"row {row} does not name {name}"
                found += 1
    assert found >= NUM_ROWS, "the pattern no longer finds the tests"
