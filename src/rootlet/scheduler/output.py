"""What goes to the detokenizer: new tokens of each request, and exactly one terminal message for each rid (I7).

Tokens are collected during a tick and sent as one `BatchTokenIDOutput`. A request that nobody streams and that has no stop string is sent in
larger bites: its first token at once, then every `QUIET_INTERVAL` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rootlet.core.clock import Clock
from rootlet.core.types import Finish, FinishKind, TokenLogprob
from rootlet.ipc.messages import BatchTokenIDOutput, DetokSpec, ReqStats, TokenIDOutput
from rootlet.scheduler.counters import Counters
from rootlet.scheduler.req import Req

QUIET_INTERVAL = 16


class Outbox:
    """Collects outputs; `flush` sends them. `request_log` gets one dict for each request that ended."""

    def __init__(
        self, send: Callable[[BatchTokenIDOutput], None], *, clock: Clock, counters: Counters, request_log: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self._send = send
        self._clock = clock
        self._counters = counters
        self._request_log = request_log
        self._outputs: list[TokenIDOutput] = []

    def flush(self) -> None:
        if self._outputs:
            batch, self._outputs = BatchTokenIDOutput(tuple(self._outputs)), []
            self._send(batch)

    def stream(self, req: Req) -> None:
        """Queue the tokens that are new since the last output, if somebody waits for them."""
        fresh = len(req.outputs) - req.out.num_sent
        if fresh and (req.spec.stream or req.spec.detok.stop or req.out.num_sent == 0 or fresh >= QUIET_INTERVAL):
            self._outputs.append(self._output(req, None))

    def terminal(self, req: Req, finish: Finish) -> None:
        """Queue the last message of `req`, with whatever was not sent yet."""
        assert not req.out.terminal_sent, f"I7 second terminal message for {req.rid}"
        req.out.terminal_sent = True
        self._outputs.append(self._output(req, finish))
        self._count(req, finish)
        if self._request_log is not None:
            self._request_log(self._log_entry(req, finish))

    def reject(self, rid: str, detok: DetokSpec, *, prompt_len: int, finish: Finish) -> None:
        """The only message of a request that was refused at the door."""
        self._outputs.append(TokenIDOutput(rid=rid, spec=detok, finish=finish, prompt_len=prompt_len, stats=ReqStats()))
        self._counters.requests += 1
        self._counters.finished_error += 1
        if self._request_log is not None:
            self._request_log({"rid": rid, "finish": finish.kind.value, "status": finish.status, "code": finish.code, "prompt_len": prompt_len})

    def _output(self, req: Req, finish: Finish | None) -> TokenIDOutput:
        out, outputs, start = req.out, req.outputs, req.out.num_sent
        out.num_sent = max(start, len(outputs))
        if finish is None and out.spec_sent and req.spec.logprobs is None:  # most outputs, and nothing but tokens
            return TokenIDOutput(
                rid=req.spec.rid,
                token_ids=tuple(outputs[start:]),
                prompt_len=req.prompt_len,
                completion_len=len(outputs),
                cached_len=req.times.cached_len,
            )
        first, out.spec_sent = not out.spec_sent, True
        return TokenIDOutput(
            rid=req.rid,
            token_ids=tuple(outputs[start:]),
            spec=req.spec.detok if first else None,
            finish=finish,
            prompt_len=req.prompt_len,
            completion_len=len(outputs),
            cached_len=req.times.cached_len,
            logprobs=tuple(out.logprobs[start:]),
            prompt_logprobs=self._prompt_logprobs(req),
            stats=None if finish is None else self._stats(req),
        )

    def _prompt_logprobs(self, req: Req) -> tuple[TokenLogprob, ...] | None:
        asked = req.spec.logprobs is not None and req.spec.logprobs.prompt_start is not None
        if not asked or req.out.prompt_logprobs_sent or not req.prompt_logprobs_complete():
            return None
        req.out.prompt_logprobs_sent = True
        return tuple(req.out.prompt_logprobs)

    def _stats(self, req: Req) -> ReqStats:
        t, now = req.times, self._clock.now()
        return ReqStats(
            queue_s=(now if t.admitted_s is None else t.admitted_s) - t.arrival_s,
            ttft_s=0.0 if t.first_token_s is None else t.first_token_s - t.arrival_s,
            e2e_s=now - t.arrival_s,
            num_chunks=t.num_chunks,
            num_retractions=t.num_retractions,
            cached_device_len=t.cached_len,
            wait_reasons=dict(t.wait_reasons),
        )

    def _tpot_s(self, req: Req) -> float | None:
        first, n = req.times.first_token_s, len(req.outputs)
        return None if first is None or n < 2 else (self._clock.now() - first) / (n - 1)

    def _count(self, req: Req, finish: Finish) -> None:
        c, stats, tpot_s = self._counters, self._stats(req), self._tpot_s(req)
        c.finished_stop += finish.kind is FinishKind.STOP
        c.finished_length += finish.kind is FinishKind.LENGTH
        c.finished_abort += finish.kind is FinishKind.ABORT
        c.finished_error += finish.kind is FinishKind.ERROR
        c.queue_s.observe(stats.queue_s)
        c.e2e_s.observe(stats.e2e_s)
        if req.times.first_token_s is not None:
            c.ttft_s.observe(stats.ttft_s)
        if tpot_s is not None:
            c.tpot_s.observe(tpot_s)

    def _log_entry(self, req: Req, finish: Finish) -> dict[str, Any]:
        stats = self._stats(req)
        return {
            "rid": req.rid,
            "finish": finish.kind.value,
            "matched": finish.matched,
            "status": finish.status,
            "code": finish.code,
            "prompt_len": req.prompt_len,
            "completion_len": len(req.outputs),
            "cached_len": req.times.cached_len,
            "cache_why": cache_why(req),
            "num_chunks": stats.num_chunks,
            "num_retractions": stats.num_retractions,
            "queue_s": stats.queue_s,
            "ttft_s": stats.ttft_s,
            "tpot_s": self._tpot_s(req),
            "e2e_s": stats.e2e_s,
            "wait_reasons": stats.wait_reasons,
            "last_why": req.times.last_why,
        }


def cache_why(req: Req) -> str:
    """Why so many tokens were hit and not more, in words."""
    t = req.times
    if t.admitted_s is None:
        return "never admitted"
    if t.cached_len == 0:
        return "miss: no cached prefix of a whole page"
    if t.cached_len >= req.prompt_len - 1:
        return "full hit: only the last token was computed"
    return f"hit of {t.cached_len} tokens: the rest of {req.prompt_len} was not cached, or is less than a page, or its logprobs were wanted"
