"""What every route is handed: the manager, the configuration, the meters, and the few questions that all of them ask.

Owns no request state. `created` = the server's start (Unix seconds); `system_fingerprint` is computed once a model is known, and kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from starlette.requests import Request

from rootlet.config.schema import RuntimeConfig
from rootlet.core.clock import Clock
from rootlet.core.errors import NotFound, Unavailable
from rootlet.frontend.admission import check_prompt_len, check_text, max_open
from rootlet.frontend.tokenizer_manager import INLINE_CHARS
from rootlet.metrics.instruments import Instruments
from rootlet.server.body import read_json
from rootlet.server.door import Manager
from rootlet.server.errors import show
from rootlet.server.fields import Fields
from rootlet.server.sampling import Limits

T = TypeVar("T")
LOADING_RETRY_S = 5.0
TENANT = "rootlet.tenant"  # in the ASGI scope: the name of the API key, where keys tell tenants apart


@dataclass(slots=True)
class ServerContext:
    manager: Manager
    config: RuntimeConfig
    meters: Instruments
    clock: Clock
    wall_clock: Callable[[], float] = time.time
    created: int = field(init=False)
    _fingerprints: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.created = self.now_unix()

    def require_ready(self) -> None:
        """Raises `Unavailable` (503) while the engine loads, drains or is dead."""
        status = self.manager.status
        if status == "ready":
            return
        if status == "draining":
            raise Unavailable("the server is shutting down and takes no new requests", code="shutting_down", retry_after_s=LOADING_RETRY_S)
        if status == "dead":
            raise Unavailable("the engine has stopped; see the server's log", code="engine_dead", retry_after_s=LOADING_RETRY_S)
        progress = self.manager.progress
        phase = f" ({progress.phase}, {progress.done:.0%})" if progress else ""
        raise Unavailable(f"the model is still loading{phase}; GET /ready tells when it is there", code="loading", retry_after_s=LOADING_RETRY_S)

    async def read_fields(self, request: Request, *, optional: bool = False) -> Fields:
        """The request's JSON body; an `optional` one may be empty. Raises 400, 413 or 415 errors."""
        return Fields(await read_json(request, max_bytes=self.config.server.max_body_mib * 2**20, optional=optional))

    def model_name(self, fields: Fields) -> str:
        """The served name to report. One served model answers to any name (tools send paths); with several names an unknown one is 404."""
        asked = fields.string("model", max_chars=1000)
        names = self.manager.served_names
        if asked is None or asked in names:
            return asked or names[0]
        if len(names) > 1:
            raise NotFound(f"the model {show(asked)} does not exist; served: {', '.join(names)}", param="model")
        return names[0]

    @property
    def vocab_size(self) -> int:
        ready = self.manager.ready_info
        return ready.vocab_size if ready else self.manager.tokenizer.vocab_size

    @property
    def max_open(self) -> int | None:
        """Most choices that may run and wait at once, None while that is not known."""
        ready = self.manager.ready_info
        return max_open(ready, self.config.scheduler.max_queue) if ready else None

    def limits(self, *, max_temperature: float = math.inf) -> Limits:
        server = self.config.server
        return Limits(
            vocab_size=self.vocab_size,
            max_n=server.max_n,
            max_logprobs=server.max_logprobs,
            max_temperature=max_temperature,
            recommended=self.manager.sampling_defaults if server.sampling_defaults == "model" else {},
        )

    def check_prompt_len(self, param: str, prompt_len: int) -> None:
        """The engine's own rule, applied to every prompt of a batch before one starts. Raises `ContextOverflow`, `PoolOverflow`."""
        if self.manager.ready_info is not None:
            check_prompt_len(param, prompt_len, self.manager.ready_info)

    def check_text(self, param: str, text: str) -> None:
        """Refuses at once what is too long however it is tokenized. Raises `ContextOverflow`, `PoolOverflow`."""
        if self.manager.ready_info is not None:
            check_text(param, text, self.manager.tokenizer, self.manager.ready_info)

    @property
    def system_fingerprint(self) -> str:
        """Changes with the version, the model and whatever of the configuration may change a result."""
        ready = self.manager.ready_info
        key = id(ready)
        if key not in self._fingerprints:
            facts = repr((self.config.model, self.config.cache.page_size, self.config.compute, ready.info if ready else None))
            self._fingerprints = {key: "b" + hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()}
        return self._fingerprints[key]

    def now_unix(self) -> int:
        return int(self.wall_clock())


def tenant_of(request: Request) -> str | None:
    """Whose key the request came with, None when keys do not tell tenants apart."""
    return cast("str | None", request.scope.get(TENANT))


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


async def offload(size: int, work: Callable[[], T]) -> T:
    """Runs tokenizing and rendering here, or in a thread when `size` characters would hold up everyone else's streams."""
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)
