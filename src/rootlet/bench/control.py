"""What the prefix cache and a tick of the scheduler cost, in microseconds beside the targets of the design and a baseline: `make bench-control`.

One thread, no model, no torch; the garbage collector is off. Medians over many single calls, each after the work of the one before it was undone
outside the clock, in rounds that interleave ours and the baseline (`radix_baseline.py`), a fixed loop of Python around each.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from rootlet.bench import control_cache, control_ticks
from rootlet.bench.calibration import exclusive
from rootlet.bench.pace import Operation, Pace, Row, cells, measure
from rootlet.bench.sections import replace_section

COLUMNS = ("operation", "target us", "ours us (p90)", "", "baseline us", "baseline / ours", "disturbed")


def main() -> None:
    """Print both tables. Exit 1 with `--strict` when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only operations whose name holds this; nothing is written then")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    options = parser.parse_args()
    gc.disable()
    with exclusive():
        pace = Pace()
        pace.take()
        rows = _measured(chain(control_cache.operations(), control_ticks.operations()), pace, options)
        parts = [_table("Full attention, beside the baseline:", rows, pace)]
        for kind in list(control_cache.KINDS)[1:]:
            others = _measured(control_cache.operations(kind), pace, options)
            if others:
                parts.append(_table(f"`{kind}`, beside the targets of full attention alone:", others, pace))
    if options.write is not None and not options.only:
        load = f"Load average at the end {os.getloadavg()[0]:.1f}."
        replace_section(options.write / "benchmarks.md", "make bench-control", "\n\n".join([*parts, load]))
    missed = [row for row in rows if row.is_missed]
    raise SystemExit(1 if options.strict and missed else 0)


def _measured(operations: Iterable[Operation], pace: Pace, options: argparse.Namespace) -> list[Row]:
    return [measure(each, pace, rounds=options.rounds) for each in operations if options.only in each.name]


def _table(title: str, rows: list[Row], pace: Pace) -> str:
    """Printed, and returned: Markdown."""
    lines = [f"| {' | '.join(cells(row, pace.best_us()))} |" for row in rows]
    text = "\n".join([title, "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *lines])
    print(f"\n{text}", flush=True)
    return text


if __name__ == "__main__":
    main()
