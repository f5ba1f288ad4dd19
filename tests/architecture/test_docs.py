"""Documents do not point at what is not there, and leave nothing out: links, paths in backticks, laws, routes, metrics, flags."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rootlet.config.schema import RuntimeConfig
from rootlet.metrics import names
from rootlet.server.app import ROUTES

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md|h|cpp))(?:::(\w+))?`")
LAW = re.compile(r"""["']([CSLERI]\d+)[: ]""")
FLAG = re.compile(r"`(?:[^`]*\s)?(--[a-z][a-z-]+)")
COMMAND_FLAGS = {"--help", "--print-config", "--url", "--model", "--config", "--raw"}  # of the command line itself, not knobs
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


def test_every_route_and_every_metric_is_documented() -> None:
    api, metrics = (ROOT / "docs" / "api.md").read_text(), (ROOT / "docs" / "metrics.md").read_text()
    routes = {path.partition("{")[0] for path, _, _ in ROUTES}  # the name of a parameter may differ
    assert not {route for route in routes if f"`{route}" not in api}
    assert not {metric.name for metric in names.REQUEST_METRICS if f"`{metric.name}`" not in metrics}


@pytest.mark.parametrize("doc", DOCS, ids=name_of)
def test_flags_exist(doc: Path) -> None:
    knobs = {"--" + k.name.replace("_", "-") for section in fields(RuntimeConfig) for k in fields(section.default_factory())}  # type: ignore[misc, arg-type]
    assert not set(FLAG.findall(doc.read_text())) - knobs - COMMAND_FLAGS
