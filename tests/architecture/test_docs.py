"""Documents do not point at what is not there: links, paths in backticks, numbers of invariants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md|h|cpp))(?:::(\w+))?`")
LAW = re.compile(r"""["']([CSLERI]\d+)[: ]""")
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
