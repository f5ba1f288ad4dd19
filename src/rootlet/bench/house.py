"""Numbers of the house: files, lines, longest file and function, import cycles, test lines, what importing costs. `make loc`."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HELP = "import sys; sys.argv = ['rootlet', '--help']; from rootlet.cli.main import main; main()"
SCHEDULER = "import sys, rootlet.scheduler.scheduler; assert 'torch' not in sys.modules"


def _lines(paths: list[Path]) -> dict[Path, int]:
    return {p: len(p.read_text(errors="replace").splitlines()) for p in paths}


def _functions(paths: list[Path]) -> Iterator[tuple[int, str]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def _imports(paths: list[Path], src: Path) -> dict[str, set[str]]:
    """Module -> modules of the house that it imports at module level (TYPE_CHECKING blocks left out)."""
    names = {".".join(p.relative_to(src).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found: set[str] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Import):
                found |= {a.name for a in node.names}
        graph[name] = (found & names.keys()) - {name}  # a package that names its own rooms is no cycle
    return graph


def cyclic_modules(graph: dict[str, set[str]]) -> set[str]:
    """Modules that can reach themselves: every module of every import cycle. O(modules * edges)."""
    found = set()
    for start, direct in graph.items():
        seen: set[str] = set()
        todo = list(direct)
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo.extend(graph[module])
        if start in seen:
            found.add(start)
    return found


def _seconds(code: str) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the table of docs/architecture.md."""
    src = ROOT / "src"
    python = sorted(src.rglob("*.py"))
    native = sorted([*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")])
    tests = sorted((ROOT / "tests").rglob("*.py"))
    sizes, functions = _lines(python), sorted(_functions(python), reverse=True)
    ordered = sorted(sizes.values())
    longest = max(sizes, key=lambda p: sizes[p])
    test_lines = sum(_lines(tests).values())
    print(f"python files {len(python)}, lines {sum(ordered)}; native files {len(native)}, lines {sum(_lines(native).values())}")
    print(f"file lines p50 {ordered[len(ordered) // 2]}, p90 {ordered[len(ordered) * 9 // 10]}, max {ordered[-1]} ({longest.relative_to(ROOT)})")
    print(f"longest function {functions[0][0]} lines ({functions[0][1]}); over 50 lines: {sum(n > 50 for n, _ in functions)} of {len(functions)}")
    print(f"modules in import cycles {len(cyclic_modules(_imports(python, src)))}")
    print(f"test files {len(tests)}, lines {test_lines}; test : code {test_lines / sum(ordered):.2f}")
    print(f"rootlet --help {_seconds(HELP):.3f} s")
    print(f"import rootlet.scheduler.scheduler {_seconds(SCHEDULER):.3f} s, no torch loaded")


if __name__ == "__main__":
    main()
