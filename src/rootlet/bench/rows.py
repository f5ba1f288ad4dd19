"""The fault table as a test report: runs the tests named test_row_NN..., prints one line a row: row | area | pass/fail | tests.

Knows the area of each row number, nothing else of the table. Rows of the cache's own design table (tests/unit/cache) have the same kind of name
and other numbers: that folder is left out. `python -m rootlet.bench.rows [pytest arguments]`; exit code 1 when a row fails or nothing ran.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

# (last row of the area, area); numbers without a check of their own are not in the report.
AREAS = (
    (8, "STREAM"), (15, "TEMPLATE"), (28, "SAMPLING"), (31, "LOGPROB"), (32, "CTX"), (39, "CONN"), (46, "SCHED"), (50, "LEAK"), (55, "CACHE"),
    (56, "CHUNK"), (57, "SPEC"), (65, "STRUCT"), (68, "TOOL"), (72, "GGUF"), (76, "SAFETENSORS"), (77, "LORA"), (81, "HICACHE"), (85, "PD"),
    (90, "LIFE"), (99, "SEC"),
)  # fmt: skip
OTHER_TABLES = ("tests/unit/cache",)
_NAME = re.compile(r"^test_row((?:_\d+)+)_")


@dataclass(slots=True)
class Row:
    """`outcomes`: test function -> its worst outcome over all parameters."""

    number: int
    outcomes: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        found = set(self.outcomes.values())
        return "FAIL" if "FAIL" in found else "pass" if "pass" in found else "skip"


def area_of(number: int) -> str:
    """The area of a row of the fault table."""
    return next((area for last, area in AREAS if number <= last), "?")


def rows_of(test_name: str) -> list[int]:
    """Row numbers that a test's name claims: test_row_26_27_x -> [26, 27]."""
    match = _NAME.match(test_name)
    return [int(n) for n in match[1].split("_")[1:]] if match else []


def collect(report: Path) -> dict[int, Row]:
    """Rows out of pytest's JUnit file."""
    rows: dict[int, Row] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = str(case.get("name")).partition("[")[0]
        broken = any(case.find(kind) is not None for kind in ("failure", "error"))
        outcome = "FAIL" if broken else "skip" if case.find("skipped") is not None else "pass"
        for number in rows_of(name):
            outcomes = rows.setdefault(number, Row(number)).outcomes
            if outcomes.get(name) != "FAIL" and (outcome != "skip" or name not in outcomes):
                outcomes[name] = outcome
    return rows


def table(rows: dict[int, Row]) -> str:
    """Markdown; a failing test's name is bold."""
    lines = ["| row | area | result | tests |", "|---|---|---|---|"]
    for number in sorted(rows):
        row = rows[number]
        names = (f"**{name}**" if outcome == "FAIL" else f"{name} (skipped)" if outcome == "skip" else name for name, outcome in row.outcomes.items())
        lines.append(f"| {number} | {area_of(number)} | {row.verdict} | {', '.join(names)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the tests from the current folder and print the table. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="rootlet-rows-") as folder:
        report = Path(folder) / "report.xml"
        ignored = [f"--ignore={path}" for path in OTHER_TABLES]
        command = [sys.executable, "-m", "pytest", "tests", "-k", "test_row_", "-m", "not slow", *ignored, f"--junitxml={report}", *arguments]
        code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        rows = collect(report) if report.is_file() else {}
    print(table(rows))
    return 0 if code == 0 and rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
