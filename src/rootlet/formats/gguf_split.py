"""Finds all pieces of a GGUF model: one file, any piece of a split (NAME-00002-of-00003.gguf), or a folder that holds one model.

Does not read tensors. Source: the naming rule and `split.*` keys that gguf-split writes.
"""

from __future__ import annotations

import re
from pathlib import Path

from rootlet.core.errors import BadModelFile
from rootlet.formats.gguf import GGUFFile

_PIECE = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")


def gguf_files(path: Path) -> list[Path]:
    """The files of the one model that `path` (file, piece or folder) means, first piece first; [] for a folder without GGUF files.

    Raises: BadModelFile naming a missing piece, or the candidates if a folder holds several models.
    """
    if path.is_file():
        return _pieces(path)
    candidates = sorted(p for p in path.glob("*.gguf") if not p.name.startswith("mmproj"))
    if not candidates:
        return []
    groups = {_group(p) for p in candidates}
    if len(groups) > 1:
        names = ", ".join(p.name for p in candidates)
        raise BadModelFile(f"{path.name}: the folder holds {len(groups)} GGUF models ({names}); give the file that is meant.")
    return _pieces(candidates[0])


def open_pieces(path: Path) -> list[GGUFFile]:
    """Open every piece and check that they belong together. Raises: BadModelFile naming the file that does not fit."""
    paths = gguf_files(path)
    if not paths:
        raise BadModelFile(f"{path.name}: no GGUF file found.")
    files = [GGUFFile(p) for p in paths]
    declared = files[0].value("split.count", 1)
    if len(files) == 1 and declared > 1:
        raise BadModelFile(
            f"{paths[0].name}: one piece of a split of {declared}, but not named NAME-00001-of-{declared:05d}.gguf or the like; restore its name."
        )
    if len(files) > 1:
        _check_pieces(files)
    return files


def _group(path: Path) -> str:
    match = _PIECE.match(path.name)
    return f"{match['stem']}|{match['count']}" if match else path.name


def _pieces(path: Path) -> list[Path]:
    match = _PIECE.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["index"]) <= count <= 9999:
        raise BadModelFile(f"{path.name}: piece {int(match['index'])} of {count} makes no sense; expected 1 to {count}.")
    found = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in found if not p.is_file()]
    if missing:
        raise BadModelFile(f"{path.name}: split model of {count} pieces; missing: {', '.join(missing)}.")
    return found


def _check_pieces(files: list[GGUFFile]) -> None:
    total = files[0].value("split.tensors.count")
    seen: dict[str, str] = {}
    for index, file in enumerate(files):
        number, count = file.value("split.no"), file.value("split.count")
        if number != index or count != len(files):
            raise BadModelFile(
                f"{file.path.name}: it says that it is piece {_ordinal(number)} of {count}, expected piece {index + 1} of {len(files)}; "
                "a piece of another split was mixed in or renamed."
            )
        if file.value("split.tensors.count") != total:
            raise BadModelFile(
                f"{file.path.name}: belongs to a split of {file.value('split.tensors.count')} tensors, but {files[0].path.name} to one of {total}."
            )
        for name in file.tensors:
            if name in seen:
                raise BadModelFile(f"{file.path.name}: tensor {name} is also in {seen[name]}; the pieces are of different splits.")
            seen[name] = file.path.name
    if total is not None and len(seen) != total:
        raise BadModelFile(f"{files[0].path.name}: the split should hold {total} tensors, its pieces hold {len(seen)}.")


def _ordinal(number: int | None) -> str:
    return "?" if number is None else str(number + 1)
