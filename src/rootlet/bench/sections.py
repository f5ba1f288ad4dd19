"""Parts of a page that commands write, each between two marks that name the command; the rest of the page is written by hand and kept."""

from __future__ import annotations

from pathlib import Path


def with_section(page: str, command: str, text: str) -> str:
    """`page` with what stands between the marks of `command` replaced; a page without them gets both at its end."""
    begin, end = f"<!-- {command} writes from here -->\n", f"<!-- {command} writes to here -->\n"
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"


def replace_section(path: Path, command: str, text: str) -> None:
    path.write_text(with_section(path.read_text() if path.exists() else "", command, text))
