"""The small JSON files of a Hugging Face model folder: config, generation_config, tokenizer_config.

Never runs code of the folder: `auto_map` and Python files are data that nobody reads. Does not interpret keys (`config.model_load`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rootlet.core.errors import BadModelFile

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises: BadModelFile naming the file if it is unreadable, not an object, or holds what is no text."""
    try:
        raw = path.read_text(encoding="utf-8")
        found = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelFile(f"{path.name}: cannot be read as JSON ({error}).") from error
    if not isinstance(found, dict):
        raise BadModelFile(f"{path.name}: expected a JSON object, found {type(found).__name__}.")
    where = _lone_surrogate(found) if _SURROGATE_ESCAPE.search(raw) else None
    if where is not None:
        raise BadModelFile(f"{path.name}: {where} holds a lone surrogate, half of a UTF-16 pair, which is no valid text; the file is damaged.")
    return found


def _lone_surrogate(root: dict[str, Any]) -> str | None:
    """The path of a string, or of an object with a key, that no UTF-8 can hold: JSON can spell it, and every use of it would fail."""
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        path, value = left.pop()
        if isinstance(value, str) and not _is_text(value):
            return path
        if isinstance(value, dict):
            if not all(map(_is_text, value)):
                return f"a key of {path}" if path else "a key"
            left += [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return None


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def read_optional_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in `folder/name`, {} if there is no such file. Raises: BadModelFile if it is damaged."""
    path = folder / name
    return read_json(path) if path.is_file() else {}


def token_text(value: Any) -> str | None:
    """The text of a token as tokenizer_config writes it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def added_token_ids(folder: Path) -> dict[str, int]:
    """Text -> id of the added tokens, from tokenizer_config.json or else tokenizer.json."""
    table = read_optional_json(folder, "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(table, dict) and table:
        return {entry["content"]: int(token_id) for token_id, entry in table.items() if isinstance(entry, dict) and "content" in entry}
    added = read_optional_json(folder, "tokenizer.json").get("added_tokens", [])
    return {entry["content"]: int(entry["id"]) for entry in added}
