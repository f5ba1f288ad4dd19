"""Documents do not point at what is not there, and leave nothing out: links, paths in backticks, laws, routes, metrics, flags."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rootlet.config.schema import RuntimeConfig
from rootlet.core.env import NOT_KNOBS
from rootlet.metrics import names
from rootlet.server.app import ROUTES

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md|h|cpp))(?:::(\w+))?`")
LAW = re.compile(r"""["']([CSLERI]\d+)[: ]""")
FLAG = re.compile(r"`(?:[^`]*\s)?(--[a-z][a-z-]+)")
COMMAND_FLAGS = {"--help", "--print-config", "--url", "--model", "--config", "--raw", "--temperature"}  # of the command line itself, not knobs
API = (ROOT / "docs" / "api.md").read_text()
BASES = (ROOT, ROOT / "src" / "rootlet", ROOT / "tests", ROOT / "csrc", ROOT / "docs")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("doc", DOCS, ids=name_of)
def test_links_lead_somewhere(doc: Path) -> None:
    targets = [t for t in LINK.findall(doc.read_text()) if "://" not in t]
    assert not [t for t in targets if not (doc.parent / t).exists()]


@pytest.mark.parametrize("doc", DOCS, ids=name_of)
def test_paths_and_the_tests_they_name_exist(doc: Path) -> None:
    missing = []
    for path, test in PATH.findall(doc.read_text()):
        found = [base / path for base in BASES if (base / path).is_file()]
        if not found or (test and f"def {test}(" not in found[0].read_text()):
            missing.append(f"{path}::{test}" if test else path)
    assert not missing


def test_every_law_that_the_code_asserts_is_explained() -> None:
    rows = dict(re.findall(r"^\| ([CSLERI]\d+) \|(.*)$", (ROOT / "docs" / "invariants.md").read_text(), re.MULTILINE))
    asserted: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src" / "rootlet").rglob("*.py")):
        for law in LAW.findall(path.read_text()):
            asserted.setdefault(law, set()).add(str(path.relative_to(ROOT / "src" / "rootlet")))
    assert len(asserted) >= 25, "the pattern no longer finds the assertions"
    untold = {law: sorted(p for p in paths if f"`{p}`" not in rows.get(law, "")) for law, paths in asserted.items()}
    assert not {law: paths for law, paths in untold.items() if paths}


def test_the_routes_of_the_docs_are_those_of_the_server() -> None:
    table = API.split("## Routes\n")[1].split("\n\n**Key.**")[0]
    told: dict[str, set[str]] = {}
    for cell, methods in re.findall(r"^\| (`/.*?) \| ([A-Z, ]+) \|", table, re.MULTILINE):
        for path in re.findall(r"`(/[^`{?]*)", cell):  # the name of a parameter may differ
            told.setdefault(path, set()).update(methods.split(", "))
    there: dict[str, set[str]] = {"/openapi.json": {"GET"}}
    for path, known, _ in ROUTES:
        there.setdefault(path.partition("{")[0], set()).update(known)
    assert told == there


def test_the_metrics_of_the_docs_are_those_of_the_server() -> None:
    rows = re.findall(r"^\| `(rootlet_\w+)` \| (\w+) \| (.*?) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    told = {(name, kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert told == {(metric.name, metric.kind, frozenset(metric.labels)) for metric in names.ALL}


def test_the_error_codes_of_the_docs_are_those_of_the_server() -> None:
    table = API.split("## Errors\n")[1].split("\n## ")[0]
    told = {code for cell in re.findall(r"^\| \d+ \| \w+ \| ([\w, ]+) \|", table, re.MULTILINE) for code in cell.split(", ")}
    rooms = [ROOT / "src" / "rootlet" / room for room in ("core", "server", "frontend", "scheduler", "engine")]
    text = "\n".join(path.read_text() for room in rooms for path in sorted(room.rglob("*.py")))
    said = set(re.findall(r"""\bcode ?= ?"([a-z_]+)"|status, type, code = .*"([a-z_]+)"$""", text, re.MULTILINE))
    there = {code for pair in said for code in pair if code}
    assert len(there) > 15, "the pattern no longer finds the codes"
    assert not there - told
    assert not {code for code in told if f'"{code}"' not in text}


def test_every_environment_name_of_the_docs_is_read() -> None:
    knobs = {"ROOTLET_" + k.name.upper() for section in fields(RuntimeConfig) for k in fields(section.default_factory())}  # type: ignore[misc, arg-type]
    told = {name for doc in DOCS for name in re.findall(r"`(ROOTLET_[A-Z_]+)", doc.read_text())}
    assert not told - knobs - NOT_KNOBS - {"ROOTLET_HYPOTHESIS_PROFILE"}  # the last one is the tests' own


@pytest.mark.parametrize("doc", DOCS, ids=name_of)
def test_flags_exist(doc: Path) -> None:
    knobs = {"--" + k.name.replace("_", "-") for section in fields(RuntimeConfig) for k in fields(section.default_factory())}  # type: ignore[misc, arg-type]
    assert not set(FLAG.findall(doc.read_text())) - knobs - COMMAND_FLAGS
