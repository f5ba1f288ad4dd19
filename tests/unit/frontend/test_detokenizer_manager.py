"""`DetokenizerManager`: batches in, text out, and the end of a request by a stop string."""

from __future__ import annotations

import numpy as np

from fixtures.fake_tokens import ByteTokens
from rootlet.core.types import Finish, FinishKind, TokenLogprob
from rootlet.frontend.detokenizer_manager import DetokenizerManager
from rootlet.ipc.messages import BatchTokenIDOutput, DetokSpec, ReqStats, StrOutput, TokenIDOutput

WORDS = [b"plan", b" Con", b"dor", b"clusion", b": end", b"<eos>", b".", "é".encode()[:1]]
EOS = 5
TOKENS = ByteTokens(WORDS, specials=[EOS])
LENGTH = Finish(FinishKind.LENGTH)


def _manager() -> DetokenizerManager:
    return DetokenizerManager(TOKENS)


def _feed(manager: DetokenizerManager, *ids: int, spec: DetokSpec | None = None, finish: Finish | None = None, rid: str = "r") -> StrOutput | None:
    logprobs = tuple(TokenLogprob(i, -float(i)) for i in ids)
    out = TokenIDOutput(rid=rid, token_ids=ids, spec=spec, finish=finish, prompt_len=3, completion_len=99, logprobs=logprobs)
    batch = manager.handle(BatchTokenIDOutput((out,)))
    return batch.outputs[0] if batch else None


def test_plain_text_flows_token_by_token() -> None:
    manager = _manager()
    first = _feed(manager, 0, spec=DetokSpec())
    assert first is not None
    assert (first.text, first.token_ids, first.completion_len, first.prompt_len) == ("plan", (0,), 1, 3)
    last = _feed(manager, 1, 2, finish=LENGTH)
    assert last is not None
    assert (last.text, last.completion_len, last.finish) == (" Condor", 3, LENGTH)
    assert manager.num_states == 0


def test_row_02_a_stop_across_tokens_ends_the_request_here() -> None:
    manager = _manager()
    spec = DetokSpec(stop=("Conclusion",))
    assert _feed(manager, 0, spec=spec).text == "plan"  # type: ignore[union-attr]
    space = _feed(manager, 1)
    assert space is not None
    assert (space.text, space.token_ids) == (" ", (1,))  # its blank is out, so the token itself is certain
    end = _feed(manager, 3)
    assert end is not None
    assert (end.text, end.token_ids, end.completion_len) == ("", (), 2)
    assert end.finish == Finish(FinishKind.STOP, matched="Conclusion")
    assert manager.num_states == 0
    assert _feed(manager, 4) is None  # what the scheduler still sends
    assert _feed(manager, 4, finish=LENGTH) is None


def test_tokens_and_logprobs_wait_with_their_text_and_are_cut_with_it() -> None:
    manager = _manager()
    spec = DetokSpec(stop=("dorclusion",))
    outs = [_feed(manager, 0, 1, spec=spec), _feed(manager, 2), _feed(manager, 3)]
    assert [o.text if o else None for o in outs] == ["plan Con", None, ""]
    assert outs[2] is not None
    assert (outs[2].token_ids, outs[2].logprobs, outs[2].completion_len) == ((), (), 2)


def test_include_stop_keeps_the_stop_and_its_tokens() -> None:
    manager = _manager()
    out = _feed(manager, 0, 1, 3, 4, spec=DetokSpec(stop=("clus",), include_stop=True))
    assert out is not None
    assert (out.text, out.token_ids, out.completion_len) == ("plan Conclus", (0, 1, 3), 3)
    assert [p.token_id for p in out.logprobs] == [0, 1, 3]


def test_a_stop_string_beats_the_schedulers_own_finish() -> None:
    out = _feed(_manager(), 0, EOS, spec=DetokSpec(stop=("lan",)), finish=Finish(FinishKind.STOP, matched=EOS))
    assert out is not None
    assert (out.text, out.finish, out.token_ids) == ("p", Finish(FinishKind.STOP, matched="lan"), (0,))


def test_held_text_is_released_when_the_request_ends_otherwise() -> None:
    manager = _manager()
    _feed(manager, 0, spec=DetokSpec(stop=("Conclusion",)))
    _feed(manager, 1)
    out = _feed(manager, 6, finish=LENGTH)
    assert out is not None
    assert out.text == "Con."
    for finish in (LENGTH, Finish(FinishKind.ABORT)):
        _feed(manager, 1, spec=DetokSpec(stop=("Conclusion",)))
        ended = _feed(manager, finish=finish)
        assert ended is not None
        assert ended.text == "Con"


def test_min_new_tokens_disarms_stop_strings() -> None:
    manager = _manager()
    out = _feed(manager, 6, 6, 6, spec=DetokSpec(stop=(".",), min_new_tokens=2))
    assert out is not None
    assert (out.text, out.completion_len, out.finish) == ("..", 2, Finish(FinishKind.STOP, matched="."))


def test_the_stop_token_counts_but_is_no_text() -> None:
    stop = Finish(FinishKind.STOP, matched=6)
    out = _feed(_manager(), 0, 6, spec=DetokSpec(), finish=stop)
    assert out is not None
    assert (out.text, out.token_ids, out.completion_len) == ("plan", (0, 6), 2)
    kept = _feed(_manager(), 0, 6, spec=DetokSpec(include_stop=True), finish=stop)
    assert kept is not None
    assert kept.text == "plan."
    hidden = _feed(_manager(), 0, EOS, spec=DetokSpec(skip_special_tokens=False), finish=Finish(FinishKind.STOP, matched=EOS))
    assert hidden is not None
    assert hidden.text == "plan"


def test_a_half_character_at_the_end_is_one_replacement_character() -> None:
    out = _feed(_manager(), 0, 7, spec=DetokSpec(), finish=LENGTH)
    assert out is not None
    assert out.text == "plan\ufffd"


def test_a_half_character_makes_no_empty_event_but_its_token_is_not_lost() -> None:
    manager = _manager()
    out = _feed(manager, 7, spec=DetokSpec())
    assert out is not None
    assert (out.text, out.token_ids) == ("", (7,))


def test_a_refused_request_passes_through_without_a_state() -> None:
    manager = _manager()
    error = Finish(FinishKind.ERROR, status=503, code="queue_full", message="full")
    out = _feed(manager, finish=error)
    assert out is None  # completion_len 99: an old request's end
    batch = manager.handle(BatchTokenIDOutput((TokenIDOutput(rid="x", finish=error, stats=ReqStats(queue_s=1.0)),)))
    assert batch is not None
    assert batch.outputs[0].finish == error
    assert manager.num_states == 0


def test_prompt_tail_decides_the_leading_space() -> None:
    manager = DetokenizerManager(ByteTokens([b" a"], left_context_dependent=True))
    tail = np.asarray([0], dtype="<i4").tobytes()
    assert _feed(manager, 0, spec=DetokSpec(prompt_tail=tail), finish=LENGTH).text == " a"  # type: ignore[union-attr]
    assert _feed(manager, 0, spec=DetokSpec(), finish=LENGTH).text == "a"  # type: ignore[union-attr]


def test_requests_of_one_batch_do_not_mix() -> None:
    manager = _manager()
    outs = (TokenIDOutput(rid="a", token_ids=(0,), spec=DetokSpec()), TokenIDOutput(rid="a-1", token_ids=(6,), spec=DetokSpec()))
    batch = manager.handle(BatchTokenIDOutput(outs))
    assert batch is not None
    assert {o.rid: o.text for o in batch.outputs} == {"a": "plan", "a-1": "."}
