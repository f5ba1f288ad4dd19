"""The line of a finished request says where its time went and what it hit; `--no-log-requests` turns it off."""

from __future__ import annotations

import logging

import pytest

from rootlet.core import log
from rootlet.engine.model_side import log_request


def test_line_names_what_happened_and_leaves_out_what_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log.configure("info", process="test")
    logging.getLogger("rootlet").propagate = True
    entry = {"rid": "a-1", "finish": "stop", "status": 200, "code": None, "cached_len": 32, "cache_why": "whole", "num_chunks": 2, "wait_reasons": {}}
    with caplog.at_level(logging.INFO):
        log_request(entry)
    assert caplog.messages == ["request rid=a-1 finish=stop cached_len=32 cache_why=whole num_chunks=2"]
