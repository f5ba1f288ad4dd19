"""docs/a-request.md is what the runtime does today: it is made again and compared, so that it cannot rot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rootlet.bench.trace_doc import make_document
from rootlet.engine.model_source import DEFAULT_MODEL, cache_folder

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "a-request.md"


@pytest.mark.model
def test_the_document_is_the_run() -> None:
    model = Path(os.environ.get("ROOTLET_TEST_MODEL", cache_folder() / DEFAULT_MODEL.file_name))
    if not model.exists():
        pytest.skip(f"no default model at {model}")
    assert make_document(model) == DOCUMENT.read_text(), "if the change is meant: python -m rootlet.bench.trace_doc > docs/a-request.md"
