"""What the HTTP server needs from the room behind it, as protocols: `frontend/tokenizer_manager.py` in production, a fake in the tests.

The server owns sockets, JSON and dialects; it never sees a page, a queue or a tensor. Everything it knows of a request comes back as
`GenerateChunk`s. Source: architecture D12.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from rootlet.frontend.types import GenerateChunk, GenerateReq
from rootlet.ipc.messages import FlushCacheReqOutput, LoadProgress, SchedulerReady


class Tokenizer(Protocol):
    """Text to ids and back. `token_bytes` are the true bytes of one token, not a re-encoding of its display form."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def min_tokens(self, text: str) -> int: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def id_to_token(self, token_id: int, /) -> str: ...


class ChatTemplate(Protocol):
    """Messages to prompt text. Raises `TemplateError` with the template's own words."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...


class Manager(Protocol):
    """The engine as the server sees it.

    `status` is one of loading, ready, draining, dead. `generate` raises `RootletError` before its first chunk only; a later failure is a chunk
    whose finish is ERROR or ABORT. Closing the generator aborts the request and gives back all it held. `tokenizer`, `chat_template`,
    `ready_info` may be asked for only when `status` is ready or draining. `num_open` = requests whose state is held, 0 when idle.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    @property
    def served_names(self) -> tuple[str, ...]: ...
    @property
    def status(self) -> str: ...
    @property
    def progress(self) -> LoadProgress | None: ...
    @property
    def ready_info(self) -> SchedulerReady | None: ...
    @property
    def sampling_defaults(self) -> dict[str, Any]: ...
    @property
    def num_open(self) -> int: ...
    def generate(self, req: GenerateReq) -> AsyncIterator[GenerateChunk]: ...
    def abort(self, rid: str | None, *, abort_all: bool = False) -> None: ...
    async def flush_cache(self, timeout_s: float) -> FlushCacheReqOutput: ...
    async def get_state(self, what: str, **args: Any) -> dict[str, Any]: ...
    def health(self) -> tuple[bool, str]: ...
