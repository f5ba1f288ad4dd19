"""Everything that can go wrong because of a user, an input file or a peer. A bug is an AssertionError, never one of these.

    RootletError                    status  type                    code
    +- InvalidValue                 400     invalid_request_error   invalid_value
    |  +- ContextOverflow           400     invalid_request_error   context_length_exceeded
    |  +- PoolOverflow              400     invalid_request_error   kv_pool_exceeded
    |  +- TemplateError             400     invalid_request_error   chat_template_error
    +- NotFound                     404     not_found_error         model_not_found
    +- TooLarge                     413     invalid_request_error   request_too_large
    +- Aborted                      499     request_aborted         aborted             (x-should-retry: false)
    +- QueueFull                    503     overloaded_error        queue_full          (Retry-After)
    +- DeadlineExceeded             504     timeout_error           deadline_exceeded   (x-should-retry: false)
    +- Unavailable                  503     unavailable_error       loading | shutting_down | engine_dead
    +- Unsupported                  501     not_supported_error     unsupported         (x-should-retry: false)
    +- RequestFailed                500     server_error            internal_error
    +- BadModelFile                 start-up: the process ends with the message and exit code 2
    +- BadConfig                    start-up: likewise

Messages say what happened, the number, the limit and the knob.
"""

from __future__ import annotations

from typing import Any

from rootlet.core.types import Finish, FinishKind

MAX_MESSAGE_CHARS = 2000


class RootletError(Exception):
    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class InvalidValue(RootletError):
    status, type, code = 400, "invalid_request_error", "invalid_value"

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message, param=param)


class ContextOverflow(InvalidValue):
    code = "context_length_exceeded"

    def __init__(self, param: str, *, prompt_len: int, ctx_len: int, at_least: bool = False) -> None:
        """`at_least`: `prompt_len` is a lower bound, for a text that was refused without tokenizing it."""
        super().__init__(
            param,
            f"This model's maximum context length is {ctx_len} tokens, however your prompt contains {'at least ' * at_least}{prompt_len} input "
            f"tokens (and at least one token must be left to generate). Shorten the prompt, or raise --ctx-len if the model was trained for more.",
        )
        self.prompt_len = prompt_len
        self.ctx_len = ctx_len


class PoolOverflow(InvalidValue):
    code = "kv_pool_exceeded"

    def __init__(self, param: str, *, prompt_len: int, pool_len: int, at_least: bool = False) -> None:
        super().__init__(
            param,
            f"The prompt contains {'at least ' * at_least}{prompt_len} input tokens, more than the KV pool of this server can ever hold for one "
            f"request ({pool_len} tokens). Shorten the prompt, or give the server more memory with --mem or --max-total-tokens.",
        )
        self.prompt_len = prompt_len
        self.pool_len = pool_len


class TemplateError(InvalidValue):
    code = "chat_template_error"

    def __init__(self, message: str) -> None:
        super().__init__("messages", message)


class NotFound(RootletError):
    status, type, code = 404, "not_found_error", "model_not_found"


class TooLarge(RootletError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class Aborted(RootletError):
    """Somebody ended the request: its client, an operator, a shutdown."""

    status, type, code = 499, "request_aborted", "aborted"


class QueueFull(RootletError):
    status, type, code = 503, "overloaded_error", "queue_full"


class DeadlineExceeded(RootletError):
    status, type, code = 504, "timeout_error", "deadline_exceeded"


class Unavailable(RootletError):
    status, type, code = 503, "unavailable_error", "loading"


class Unsupported(RootletError):
    status, type, code = 501, "not_supported_error", "unsupported"


class RequestFailed(RootletError):
    """One request failed inside the engine (NaN logits, a failing step); its neighbours go on."""


class BadModelFile(RootletError):
    """A truncated, unknown or mismatching model file. Names the file, the tensor or key, and what was expected."""


class BadConfig(RootletError):
    """A flag, environment variable or file key that does not exist or has no valid value."""


_BY_STATUS: dict[int, type[RootletError]] = {e.status: e for e in (Aborted, Unsupported, Unavailable, DeadlineExceeded)}


def error_of(finish: Finish, *, param: str | None = None, retry_after_s: float | None = None) -> RootletError:
    """The exception that a `Finish` of kind ERROR or ABORT stands for: one rule for every dialect and for the Python API.

    `param` names the request's field that a 400 is about; `retry_after_s` goes with a full queue. A missing status is 499 or 500.
    """
    is_abort = finish.kind is FinishKind.ABORT
    status = finish.status if finish.status >= 400 else Aborted.status if is_abort else RequestFailed.status
    message = finish.message or ("the request was aborted" if is_abort else "the engine failed this request")
    if finish.code == QueueFull.code:
        return QueueFull(message, retry_after_s=retry_after_s)
    error = InvalidValue(param, message) if status < 500 and status not in _BY_STATUS else _BY_STATUS.get(status, RequestFailed)(message)
    error.status, error.code = status, finish.code or error.code
    return error


def envelope(error: RootletError) -> dict[str, Any]:
    """The JSON body of an error, of every route and of bytes that are no HTTP: `{"error": {message, type, param, code, status}}`.

    `code` is a string, `status` repeats the HTTP status for readers that expect an integer. A message is cut, so that a huge bad input is not
    sent back to its sender.
    """
    message = error.message if len(error.message) <= MAX_MESSAGE_CHARS else error.message[:MAX_MESSAGE_CHARS] + "..."
    param = error.param if error.param is None or len(error.param) <= 200 else error.param[:200] + "..."
    body: dict[str, Any] = {"message": message, "type": error.type, "param": param, "code": error.code, "status": error.status}
    if isinstance(error, ContextOverflow):
        body |= {"n_prompt_tokens": error.prompt_len, "n_ctx": error.ctx_len}
    if isinstance(error, PoolOverflow):
        body |= {"n_prompt_tokens": error.prompt_len, "n_pool": error.pool_len}
    return {"error": body}
