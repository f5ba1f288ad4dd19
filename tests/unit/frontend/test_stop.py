"""Stop strings: who wins, what is held back, what is given out."""

from __future__ import annotations

import pytest

from rootlet.frontend.stop import StopMatcher


def _run(stops: tuple[str, ...], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    out = []
    for piece in pieces:
        out.append(matcher.push(piece))
        if matcher.match:
            break
    else:
        out.append(matcher.flush())
    return out, matcher


def test_row_02_only_a_tail_that_may_become_a_stop_is_held() -> None:
    out, matcher = _run(("Conclusion",), list("plan Condor Conclusion: end"))
    assert "".join(out) == "plan Condor "
    assert out[:9] == ["p", "l", "a", "n", " ", "", "", "", "Cond"]  # "Con" waits, "d" frees it
    assert matcher.match is not None
    assert (matcher.match.start, matcher.match.end) == (12, 22)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("stops", "stop", "end"),
    [
        (("Conclusion", "Con:"), "Conclusion", 22),
        (("clusion",), "clusion", 22),
        ((" ",), " ", 5),
        (("x" * 200,), None, 27),
        (("nd", "Condor"), "nd", 9),
        (("Condor Conclusion", "or Con"), "or Con", 15),
        (("r", "dor", "or"), "r", 11),
        (("dor", "r", "or"), "dor", 11),
    ],
)
def test_row_02_earliest_end_wins_and_ties_go_by_list_order(stops: tuple[str, ...], stop: str | None, end: int, size: int, include: bool) -> None:
    text = "plan Condor Conclusion: end"
    out, matcher = _run(stops, [text[k : k + size] for k in range(0, len(text), size)], include_stop=include)
    assert (matcher.match.stop if matcher.match else None) == stop
    assert "".join(out) == text[: end if include or stop is None else end - len(stop)]


def test_an_unarmed_stop_is_ignored_but_one_that_ends_later_counts() -> None:
    matcher = StopMatcher(("ab", "cd"))
    assert matcher.push("ab", armed=False) == "ab"
    assert matcher.push("c", armed=False) == ""
    assert matcher.push("d", armed=True) == ""
    assert matcher.match is not None
    assert matcher.match.start == 2


def test_an_ignored_stop_that_begins_a_longer_one_stays_held() -> None:
    matcher = StopMatcher(("ab", "abc"))
    assert matcher.push("ab", armed=False) == ""
    assert matcher.push("c") == ""
    assert matcher.match is not None
    assert matcher.match.stop == "abc"


def test_flush_gives_back_what_was_held() -> None:
    out, matcher = _run(("STOP",), ["a S", "TO"])
    assert out == ["a ", "", "STO"]
    assert matcher.released == 5


def test_self_overlapping_stop() -> None:
    out, _ = _run(("aab",), ["aaaa", "ab"])
    assert out == ["aa", "a"]  # "aa" may always begin the stop; the text is aaa + aab
