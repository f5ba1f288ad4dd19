"""Wire format: every message survives the trip, and nothing else gets in."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from rootlet.core.sampling_params import SamplingParams
from rootlet.core.types import Finish, FinishKind, LogprobSpec, TokenLogprob
from rootlet.ipc.codec import detokenizer_codec, main_codec, scheduler_codec
from rootlet.ipc.messages import (
    AbortReq,
    BatchStrOutput,
    BatchTokenIDOutput,
    DetokSpec,
    FlushCacheReq,
    GetStateReq,
    GetStateReqOutput,
    HealthTick,
    LoadProgress,
    SchedulerError,
    SchedulerReady,
    ShutdownReq,
    StopReq,
    StrOutput,
    TokenIDOutput,
    TokenizedGenerateReqInput,
)

REQUEST = TokenizedGenerateReqInput(
    rid="r",
    input_ids=np.asarray([1, 2, 2**31 - 1], dtype="<i4").tobytes(),
    sampling=SamplingParams(logit_bias={5: -1.5}, stop=("a", "ü"), seed=2**63 - 1, allowed_token_ids=(1, 2)),
    detok=DetokSpec(stop=("a", "ü"), prompt_tail=b"\x00\xff"),
    logprobs=LogprobSpec(top_n=3, prompt_start=0),
    parent_rid="p",
    deadline_s=1.5,
)
TO_SCHEDULER = [
    REQUEST,
    AbortReq("r"),
    AbortReq(abort_all=True),
    StopReq("r", 3, "x"),
    FlushCacheReq("q", 1.0),
    GetStateReq("q", "state", {"a": [1]}),
    ShutdownReq(2.0),
]
LOGPROBS = (TokenLogprob(1, -0.5, (1,), (-0.5,)), TokenLogprob(2, None))
TOKENS = BatchTokenIDOutput((TokenIDOutput(rid="r", token_ids=(1, 2), spec=DetokSpec(), logprobs=LOGPROBS),))
STOPPED = StrOutput(rid="r", text="héé\ufffd", finish=Finish(FinishKind.STOP, matched="x"))
TO_MAIN = [
    BatchStrOutput((STOPPED, StrOutput(rid="s", finish=Finish(FinishKind.STOP, matched=7)))),
    LoadProgress("weights", 0.5),
    SchedulerReady(1, 16, 2, 3, 4, 5, ("a",), {"k": 1}),
    GetStateReqOutput("q", {"nested": {"a": [1, None, "x"]}}),
    HealthTick(1),
    SchedulerError("bad", 2),
    TOKENS,
]


@pytest.mark.parametrize("message", TO_SCHEDULER, ids=lambda m: type(m).__name__)
def test_messages_to_the_scheduler_survive_the_trip(message: object) -> None:
    codec = scheduler_codec()
    assert codec.decode(codec.encode(message)) == message  # type: ignore[arg-type]


@pytest.mark.parametrize("message", TO_MAIN, ids=lambda m: type(m).__name__)
def test_messages_to_main_survive_the_trip(message: object) -> None:
    codec = main_codec()
    assert codec.decode(codec.encode(message)) == message  # type: ignore[arg-type]


def test_messages_to_the_detokenizer_survive_the_trip() -> None:
    codec = detokenizer_codec()
    assert codec.decode(codec.encode(TOKENS)) == TOKENS


def test_a_message_of_another_direction_is_dropped() -> None:
    assert scheduler_codec().decode(main_codec().encode(HealthTick(1))) is None


class _Marker:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self._path),))


def test_row_92_garbage_and_pickles_are_dropped_unopened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    good = scheduler_codec().encode(REQUEST)
    frames = [b"", b"\x00", b"\xff" * 100, pickle.dumps(_Marker(marker)), good[:-1], good + b"x", b"\x91" * 5000, b"\x81\xa4type\xa2\xff\xfe"]
    assert [scheduler_codec().decode(frame) for frame in frames] == [None] * len(frames)
    assert not marker.exists()


def test_numpy_numbers_travel_as_plain_ones() -> None:
    codec = main_codec()
    sent = GetStateReqOutput("q", {"n": np.int64(3), "x": np.float32(0.5), "odd": {"path": Path("a")}})
    assert codec.decode(codec.encode(sent)) == GetStateReqOutput("q", {"n": 3, "x": 0.5, "odd": {"path": "a"}})
