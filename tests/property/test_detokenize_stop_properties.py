"""Laws of the text side, against oracles that see the whole: bytes.decode, str.find, and a brute-force suffix test."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.fake_tokens import ByteTokens
from rootlet.core.types import Finish, FinishKind
from rootlet.frontend.detokenize import IncrementalDetokenizer
from rootlet.frontend.detokenizer_manager import DetokenizerManager
from rootlet.frontend.stop import StopMatcher
from rootlet.ipc.messages import BatchTokenIDOutput, DetokSpec, StrOutput, TokenIDOutput

HARD = ["我很好", "🧑‍🚀", "🏳️‍🌈", "é́", "ไทย", "가", "a", " ", "\n", "\ufffd", "\u2028"]
texts = st.lists(st.sampled_from(HARD), max_size=8).map("".join)
raw = st.one_of(texts.map(str.encode), st.binary(max_size=24), st.builds(lambda a, b: a + b, texts.map(str.encode), st.binary(max_size=6)))


@st.composite
def cut_bytes(draw: st.DrawFn) -> list[bytes]:
    """Some bytes, cut into tokens anywhere."""
    data = draw(raw)
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))))
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=120, deadline=None)
@given(cut_bytes())
def test_pieces_join_to_the_whole_and_never_show_a_character_early(pieces: list[bytes]) -> None:
    state = IncrementalDetokenizer(ByteTokens(pieces))
    shown, seen = "", b""
    for k, piece in enumerate(pieces):
        text, start = state.push(k)
        seen += piece
        assert start <= len(shown) + 1
        shown += text
        # Whatever may follow, what is shown stays true: it is a prefix of every continuation.
        for rest in (b"", b"a", b"\x80", b"\xbf\xbf"):
            assert (seen + rest).decode("utf-8", "replace").startswith(shown)
    assert shown + state.finish() == seen.decode("utf-8", "replace")


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """(start, end) by brute force: the smallest end, then the first listed."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), end
    return None


def _held(text: str, stops: tuple[str, ...]) -> int:
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


small_text = st.text("abc", max_size=30)
small_stops = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5).map(tuple)


@settings(max_examples=200, deadline=None)
@given(small_text, small_stops, st.integers(1, 7), st.booleans())
def test_stop_matcher_against_brute_force(text: str, stops: tuple[str, ...], size: int, include: bool) -> None:
    matcher, out, fed = StopMatcher(stops, include_stop=include), "", ""
    for k in range(0, len(text), size):
        fed += text[k : k + size]
        out += matcher.push(text[k : k + size])
        if matcher.match:
            break
        assert out == fed[: len(fed) - _held(fed, stops)]  # held back: exactly the longest proper prefix
    want = _first_stop(text, stops)
    if want is None:
        assert matcher.match is None
        assert out + matcher.flush() == text
    else:
        assert matcher.match is not None
        assert (matcher.match.start, matcher.match.end) == want
        assert out == text[: want[1] if include else want[0]]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.text("abc", max_size=3), max_size=12), small_stops, st.booleans(), st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_a_stream_of_batches_equals_one_batch(pieces: list[str], stops: tuple[str, ...], include: bool, sizes: list[int]) -> None:
    tokens = ByteTokens([p.encode() for p in pieces])
    spec = DetokSpec(stop=stops, include_stop=include)
    end = Finish(FinishKind.LENGTH)

    def run(groups: list[tuple[int, ...]]) -> tuple[str, tuple[int, ...], Finish | None, int]:
        manager = DetokenizerManager(tokens)
        outs: list[StrOutput] = []
        for k, group in enumerate(groups):
            last = k == len(groups) - 1
            out = TokenIDOutput(rid="r", token_ids=group, spec=spec if k == 0 else None, finish=end if last else None, completion_len=1)
            batch = manager.handle(BatchTokenIDOutput((out,)))
            outs += batch.outputs if batch else ()
        assert manager.num_states == 0
        assert [o.finish is not None for o in outs] == [False] * (len(outs) - 1) + [True]
        return "".join(o.text for o in outs), tuple(i for o in outs for i in o.token_ids), outs[-1].finish, outs[-1].completion_len

    groups, at = [], 0
    for size in sizes:
        groups.append(tuple(range(at, min(at + size, len(pieces)))))
        at += size
    groups.append(tuple(range(at, len(pieces))))
    whole = run([tuple(range(len(pieces)))])
    assert run(groups) == whole
    text = "".join(pieces)
    want = _first_stop(text, stops)
    cut = len(text) if want is None else want[1] if include else want[0]
    assert whole[0] == text[:cut]
    kept = len(pieces) if want is None else sum(1 for k in range(len(pieces)) if sum(map(len, pieces[:k])) < cut)
    assert whole[1] == tuple(range(kept))
    assert whole[3] == kept
