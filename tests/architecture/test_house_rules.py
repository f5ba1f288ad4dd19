"""The rules of the house as tests: sizes, names, docstrings, where device words and broad handlers may stand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from rootlet.config.schema import RuntimeConfig

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "rootlet"
FILES = sorted(SRC.rglob("*.py"))
NATIVE = sorted([*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")])
# The process mains: they dump state and fail the affected requests (style guide). Nowhere else may everything be caught.
PROCESS_MAINS = {"engine/processes.py", "engine/launch.py", "runner/worker.py", "cli/main.py"}
DEVICE_WORDS = re.compile(r"\b(cuda|triton|avx2?|avx512|is_cpu|neon)\b", re.IGNORECASE)
DEVICE_ROOMS = ("device/", "kernels/cpu/", "kernels/triton/", "attention/cpu.py", "attention/triton.py")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def name_of(path: Path) -> str:
    return str(path.relative_to(SRC))


def code_words(source: str) -> list[tuple[int, str]]:
    """Identifiers and string literals that are not docstrings: where a device word would steer behaviour."""
    tree = ast.parse(source)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and n.body and isinstance(n.body[0], ast.Expr)}
    out: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            out.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            out.append((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            out.append((node.lineno, node.value))
    return out


@pytest.mark.parametrize("path", FILES + NATIVE, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_stays_under_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_functions_and_classes_stay_small_and_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    faults = []
    if not ast.get_docstring(tree) and path.name != "__init__.py":
        faults.append("module without docstring")
    for fn in functions(tree):
        if length(fn) > 60:
            faults.append(f"{fn.name}:{fn.lineno} has {length(fn)} lines")
        if not fn.name.startswith("_") and length(fn) > 12 and not ast.get_docstring(fn):
            faults.append(f"{fn.name}:{fn.lineno} is public, long, and has no docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len(methods) > 20:
                faults.append(f"class {node.name} has {len(methods)} methods")
    assert not faults


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_catches_everything_outside_the_process_mains(path: Path) -> None:
    if name_of(path) in PROCESS_MAINS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"})
            assert not broad, f"line {node.lineno} catches everything"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if name_of(path) != "core/env.py":
        assert not re.search(r"\bos\.(environ|getenv|putenv)\b", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_device_words_stay_in_their_rooms(path: Path) -> None:
    # config/schema.py offers the choice by name; it decides nothing with it.
    if name_of(path).startswith(DEVICE_ROOMS) or name_of(path) == "config/schema.py":
        return
    hits = [f"{line}: {word[:60]}" for line, word in code_words(path.read_text()) if DEVICE_WORDS.search(word)]
    assert not hits


@pytest.mark.parametrize("path", FILES + NATIVE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_debt_comments_and_no_stubs(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    # A library's own may be caught and told as one of our errors.
    assert "raise NotImplementedError" not in text


def test_module_names_say_what_they_hold() -> None:
    assert not [name_of(p) for p in FILES if p.stem in {"utils", "common", "helpers", "misc", "util"}]


def test_at_most_sixty_knobs_each_with_help() -> None:
    knobs = [k for section in fields(RuntimeConfig) for k in fields(section.default_factory())]  # type: ignore[misc, arg-type]
    assert len(knobs) <= 60
    assert all(k.metadata.get("help") for k in knobs)
    assert len({k.name for k in knobs}) == len(knobs), "a flag name must be unique over all sections"


@pytest.mark.parametrize("room", ["core", "formats", "config", "ipc", "metrics", "memory", "cache", "scheduler", "frontend", "server"])
def test_importing_a_room_of_the_control_wing_loads_no_torch(room: str) -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        f"p = importlib.import_module('rootlet.{room}')\n"
        "for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.'): importlib.import_module(m.name)\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_is_quick_enough_to_be_used() -> None:
    """`rootlet --help` imports neither torch nor numpy nor a server; the time itself is measured by `make loc`."""
    code = "import sys, rootlet.cli.main; assert not {'torch', 'numpy', 'fastapi', 'tokenizers'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
