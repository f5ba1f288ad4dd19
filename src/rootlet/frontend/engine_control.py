"""What operators tell the engine, beside requests: pause and continue, pin and unpin cached prefixes. One message, one answer.

Asyncio, one loop. Does not check values that come from a body: the server does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from rootlet.frontend.pending_calls import PendingCalls
from rootlet.ipc.messages import GetStateReqOutput, PauseReq, PinReq, ToScheduler

ANSWER_S = 10.0


class EngineControl:
    """`check_open` raises `Unavailable` when the engine cannot be asked; so does every method, also when no answer comes."""

    def __init__(self, send: Callable[[ToScheduler], None], calls: PendingCalls, check_open: Callable[[], Any]) -> None:
        self._send = send
        self._calls = calls
        self._check_open = check_open

    async def _ask(self, make: Callable[[str], ToScheduler]) -> dict[str, Any]:
        self._check_open()
        answer = await self._calls.call(lambda req_id: self._send(make(req_id)), ANSWER_S)
        assert isinstance(answer, GetStateReqOutput)
        return answer.state

    async def pause(self, mode: Literal["in_place", "retract", "abort"]) -> dict[str, Any]:
        """Launch nothing more until `resume`; `mode` says what becomes of running requests."""
        return await self._ask(lambda req_id: PauseReq(req_id, paused=True, mode=mode))

    async def resume(self) -> dict[str, Any]:
        return await self._ask(lambda req_id: PauseReq(req_id, paused=False))

    async def pin(self, input_ids: Sequence[int], *, ttl_s: float, extra_key: str | None, cache_salt: str | None) -> dict[str, Any]:
        """Keep what is cached of this prefix for `ttl_s` seconds: {"pin_id", "tokens", "of"}, pin_id None when nothing of it is cached."""
        packed = np.asarray(input_ids, dtype="<i4").tobytes()
        return await self._ask(lambda i: PinReq(i, "pin", input_ids=packed, ttl_s=ttl_s, extra_key=extra_key, cache_salt=cache_salt))

    async def unpin(self, pin_id: str | None) -> dict[str, Any]:
        """One pin, or all: {"unpinned": [ids]}."""
        return await self._ask(lambda req_id: PinReq(req_id, "unpin", pin_id=pin_id))

    async def pins(self) -> dict[str, Any]:
        return await self._ask(lambda req_id: PinReq(req_id, "list"))
