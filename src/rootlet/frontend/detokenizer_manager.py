"""`DetokenizerManager`: token ids in, text out, stop strings found. Runs inside main or as a process of its own; same object.

Owns the text side of every request between its first and its last output (`DecodeStatus`). A stop string ends the request HERE: the terminal
message goes to the client at once, cut to the tokens whose text survived, and whatever the scheduler still sends for that rid is dropped.
`TokenizerManager` tells the scheduler (`StopReq`). With stop strings, tokens are held back together with their text, so a stream never
gives a token or a logprob that a stop would have to take back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rootlet.core.types import Finish, FinishKind, TokenLogprob
from rootlet.frontend.detokenize import IncrementalDetokenizer, TokenBytes, VisibleBytes
from rootlet.frontend.stop import StopMatcher
from rootlet.ipc.messages import BatchStrOutput, BatchTokenIDOutput, DetokSpec, StrOutput, TokenIDOutput


@dataclass(slots=True)
class _Held:
    """A token not yet given out. `start` = first character it helps to spell."""

    token_id: int
    start: int
    logprob: TokenLogprob | None


@dataclass(slots=True)
class DecodeStatus:
    """Text state of one rid. `num_drawn` tokens came in, `num_sent` went out; the difference is `held`."""

    spec: DetokSpec
    text: IncrementalDetokenizer
    stop: StopMatcher | None
    num_drawn: int = 0
    num_sent: int = 0
    held: deque[_Held] = field(default_factory=deque)

    @property
    def stopped(self) -> bool:
        return self.stop is not None and self.stop.match is not None

    def push(self, token_id: int, logprob: TokenLogprob | None, *, textless: bool) -> str:
        """One drawn token; returns the text that became certain."""
        text, start = ("", self.text.num_chars) if textless else self.text.push(token_id)
        self.num_drawn += 1
        self.held.append(_Held(token_id, start, logprob))
        if self.stop is None:
            return text
        return self.stop.push(text, armed=self.num_drawn > self.spec.min_new_tokens)

    def flush(self) -> str:
        """The sequence ended: a broken last character, and what was held back in case of a stop."""
        tail = self.text.finish()
        if self.stop is None:
            return tail
        out = self.stop.push(tail, armed=self.num_drawn > self.spec.min_new_tokens)
        return out if self.stopped else out + self.stop.flush()

    def take(self, *, ended: bool) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Tokens that can no longer be cut: all, or with stop strings those that spell some character that was given out."""
        limit = None
        if self.stop is not None and self.stop.match is not None:
            limit = self.stop.match.cut
        elif self.stop is not None and not ended:
            limit = self.stop.released
        taken: list[_Held] = []
        while self.held and (limit is None or self.held[0].start < limit):
            taken.append(self.held.popleft())
        self.num_sent += len(taken)
        return tuple(t.token_id for t in taken), tuple(t.logprob for t in taken if t.logprob is not None)


class DetokenizerManager:
    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._visible = {skip: VisibleBytes(tokens, skip_special_tokens=skip) for skip in (False, True)}
        self._status: dict[str, DecodeStatus] = {}

    @property
    def num_states(self) -> int:
        """Requests between their first and their last output; 0 when idle."""
        return len(self._status)

    def handle(self, batch: BatchTokenIDOutput) -> BatchStrOutput | None:
        """Text of one step's outputs; None when there is nothing to tell. O(tokens in the batch)."""
        outputs = [out for out in map(self._one, batch.outputs) if out is not None]
        return BatchStrOutput(tuple(outputs)) if outputs else None

    def _one(self, out: TokenIDOutput) -> StrOutput | None:
        if out.spec is not None:
            self._status[out.rid] = self._begin(out.spec)
        status = self._status.get(out.rid)
        if status is None:
            # Ended by a stop string a moment ago: the client has its terminal message. Or ended before it ever began: pass that on.
            return _textless(out) if out.finish is not None and out.completion_len == 0 and not out.token_ids else None
        if status.stop is None and out.finish is None and out.spec is None and out.prompt_logprobs is None:
            return _running(status, out)
        text = self._decode(status, out)
        ended = status.stopped or out.finish is not None
        if ended:
            del self._status[out.rid]
        token_ids, logprobs = status.take(ended=ended)
        if not ended and not text and not token_ids and out.prompt_logprobs is None:
            return None
        return _with_text(out, status, text, token_ids, logprobs)

    def _begin(self, spec: DetokSpec) -> DecodeStatus:
        tail = np.frombuffer(spec.prompt_tail, dtype="<i4").tolist()
        skip = spec.skip_special_tokens
        text = IncrementalDetokenizer(self._tokens, skip_special_tokens=skip, prompt_tail=tail, visible=self._visible[skip])
        stop = StopMatcher(spec.stop, include_stop=spec.include_stop) if spec.stop else None
        return DecodeStatus(spec, text, stop)

    def _decode(self, status: DecodeStatus, out: TokenIDOutput) -> str:
        pieces: list[str] = []
        last = len(out.token_ids) - 1
        for k, token_id in enumerate(out.token_ids):
            # The token that stopped the request counts, but it is no text.
            textless = k == last and out.finish is not None and out.finish.matched == token_id and not status.spec.include_stop
            pieces.append(status.push(token_id, out.logprobs[k] if out.logprobs else None, textless=textless))
            if status.stopped:
                return "".join(pieces)
        if out.finish is not None:
            pieces.append(status.flush())
        return "".join(pieces)


def _running(status: DecodeStatus, out: TokenIDOutput) -> StrOutput | None:
    """The output of a request in its middle that has no stop strings, which is nearly every one: nothing is ever held back."""
    token_ids = out.token_ids
    if not token_ids:
        return None
    text = status.text.push(token_ids[0])[0] if len(token_ids) == 1 else "".join([status.text.push(i)[0] for i in token_ids])
    status.num_drawn += len(token_ids)
    status.num_sent += len(token_ids)
    return StrOutput(
        rid=out.rid,
        text=text,
        token_ids=token_ids,
        prompt_len=out.prompt_len,
        completion_len=status.num_sent,
        cached_len=out.cached_len,
        logprobs=out.logprobs,
    )


def _with_text(out: TokenIDOutput, status: DecodeStatus, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> StrOutput:
    finish = out.finish
    if status.stop is not None and status.stop.match is not None:
        finish = Finish(FinishKind.STOP, matched=status.stop.match.stop)
    return StrOutput(
        rid=out.rid,
        text=text,
        token_ids=token_ids,
        finish=finish,
        prompt_len=out.prompt_len,
        completion_len=status.num_sent,
        cached_len=out.cached_len,
        logprobs=logprobs,
        prompt_logprobs=out.prompt_logprobs,
        stats=out.stats,
    )


def _textless(out: TokenIDOutput) -> StrOutput:
    return StrOutput(
        rid=out.rid, finish=out.finish, prompt_len=out.prompt_len, cached_len=out.cached_len, prompt_logprobs=out.prompt_logprobs, stats=out.stats
    )
