"""A terminal message and the exception that it stands for."""

from __future__ import annotations

import pytest

from rootlet.core.errors import (
    Aborted,
    ContextOverflow,
    DeadlineExceeded,
    InvalidValue,
    QueueFull,
    RequestFailed,
    RootletError,
    Unavailable,
    Unsupported,
    error_of,
)
from rootlet.core.types import Finish, FinishKind


@pytest.mark.parametrize(("finish", "kind", "status", "type_", "code"), [
    (Finish(FinishKind.ABORT), Aborted, 499, "request_aborted", "aborted"),
    (Finish(FinishKind.ABORT, status=503, code="shutting_down"), Unavailable, 503, "unavailable_error", "shutting_down"),
    (Finish(FinishKind.ERROR), RequestFailed, 500, "server_error", "internal_error"),
    (Finish(FinishKind.ERROR, status=400, code="kv_pool_exceeded"), InvalidValue, 400, "invalid_request_error", "kv_pool_exceeded"),
    (Finish(FinishKind.ERROR, status=503, code="queue_full"), QueueFull, 503, "overloaded_error", "queue_full"),
    (Finish(FinishKind.ERROR, status=503, code="engine_dead"), Unavailable, 503, "unavailable_error", "engine_dead"),
    (Finish(FinishKind.ERROR, status=504, code="deadline_exceeded"), DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Finish(FinishKind.ERROR, status=501), Unsupported, 501, "not_supported_error", "unsupported"),
])  # fmt: skip
def test_a_failed_finish_is_one_exception_everywhere(finish: Finish, kind: type[RootletError], status: int, type_: str, code: str) -> None:
    error = error_of(finish, param="prompt", retry_after_s=3.0)
    assert type(error) is kind
    assert (error.status, error.type, error.code) == (status, type_, code)
    assert error.retry_after_s == (3.0 if kind is QueueFull else None)
    assert error.param == ("prompt" if kind is InvalidValue else None)
    assert error.message
    assert error_of(Finish(finish.kind, status=status, code=code, message="so it was")).message == "so it was"


def test_a_long_prompt_is_not_sent_after_a_flag_that_may_be_of_no_use() -> None:
    message = str(ContextOverflow("prompt", prompt_len=9001, ctx_len=8192))
    assert "maximum context length is 8192 tokens, however your prompt contains 9001 input tokens" in message  # what clients search for
    assert message.endswith("Shorten the prompt, or raise --ctx-len if the model was trained for more.")
