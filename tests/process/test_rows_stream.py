"""Rows STREAM of the fault table (1, 2, 3, 6, 7) on a real server: what a reader gets piece by piece is what it would get at once.

M-chain plays known texts one byte token at a time, so that every cut inside a character, a stop string or an event can be asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from fixtures.chain_model import Chain, make_chain
from fixtures.live_server import Live, live, tiny_flags, tiny_llama
from fixtures.wire import (
    ROUTES,
    RawReader,
    assert_refused,
    connect,
    events_of,
    finishes,
    generation,
    joined,
    post,
    request_bytes,
    stream,
    text_of,
    whole,
)

pytestmark = pytest.mark.process

UNICODE = "我很好🧑‍🚀🏳️‍🌈é́ไทย가"
PLAN = "plan Condor Conclusion: end"
SCRIPTS = (UNICODE, PLAN, "0123456789ABCDEFGHIJKLM", b"caf\xc3\xa9 \xff\xfe\xe6\x88 \xf0\x9f ok")
FLAGS = tiny_flags(pool=4096, running=8)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return make_chain(tmp_path_factory.mktemp("chain"), *SCRIPTS)


@pytest.fixture(scope="module")
def server(chain: Chain) -> Iterator[Live]:
    with live(chain.folder, *FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """M-tiny: random weights, so random bytes."""
    with live(tiny_llama(tmp_path_factory.mktemp("noisy")), *tiny_flags(pool=8192, running=8)) as made:
        yield made


@pytest.mark.parametrize("path", ROUTES)
def test_row_01_streamed_characters_are_whole_and_none_is_lost(server: Live, chain: Chain, path: str) -> None:
    for max_tokens in (200, *range(1, 21)):
        body = generation(path, chain.play(0), max_tokens=max_tokens)
        at_once = text_of(whole(server.server.base, path, body)["choices"][0])
        events = stream(server.server.base, path, body)
        deltas = [text_of(e["choices"][0]) for e in events if e["choices"]]
        assert "".join(deltas) == at_once
        assert all("�" not in d for d in deltas[:-2]), deltas  # only the very end may be cut inside a character
        made = UNICODE.encode()[: _num_bytes(chain, max_tokens)]
        assert at_once == made.decode("utf-8", "replace")
    assert at_once.rstrip("�") in UNICODE
    server.assert_live()


def _num_bytes(chain: Chain, num_tokens: int) -> int:
    """Bytes of the first tokens of script 0."""
    ids = chain.pieces[0][:num_tokens]
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(chain.folder / "tokenizer.json"))
    return sum(len(backend.id_to_token(i) or "") for i in ids)


STOPS: list[tuple[Any, str, str | None]] = [
    ("Conclusion", "plan Condor ", "Conclusion"),
    (["Conclusion", "Con:"], "plan Condor ", "Conclusion"),
    ("clusion", "plan Condor Con", "clusion"),
    (" ", "plan", " "),
    ("x" * 200, PLAN, None),
    ([], PLAN, None),
    ("end", PLAN.removesuffix("end"), "end"),
    (["or C", "Conclusion"], "plan Cond", "or C"),
    (["Conclusion", "Condor Conclusion: en"], "plan Condor ", "Conclusion"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("case", STOPS, ids=lambda case: repr(case[0])[:30])
def test_row_02_the_text_ends_before_the_stop_in_both_modes(server: Live, chain: Chain, path: str, case: tuple[Any, str, str | None]) -> None:
    stop, cut, matched = case
    body = generation(path, chain.play(1), max_tokens=100, stop=stop)
    choice = whole(server.server.base, path, body)["choices"][0]
    events = stream(server.server.base, path, body)
    assert text_of(choice) == joined(events) == cut
    assert choice["finish_reason"] == "stop"
    assert finishes(events) == ["stop"]
    if matched is not None:
        assert choice["stop_reason"] == matched
        kept = {**body, "include_stop_str_in_output": True}
        assert text_of(whole(server.server.base, path, kept)["choices"][0]) == joined(stream(server.server.base, path, kept)) == cut + matched


@pytest.mark.parametrize("path", ROUTES)
def test_row_02_an_empty_stop_is_refused(server: Live, chain: Chain, path: str) -> None:
    for stop in ("", ["Con", ""]):
        assert_refused(post(server.server.base, path, generation(path, chain.play(1), stop=stop)))
        assert_refused(post(server.server.base, path, generation(path, chain.play(1), stop=stop, stream=True)))


def _noise(rng: random.Random, i: int) -> tuple[str, dict[str, Any]]:
    path = ROUTES[i % 2]
    body = generation(path, rng.choice(["a", "zz", "q!"]), temperature=2, max_tokens=300, seed=i, ignore_eos=True)
    if i % 3 == 0:
        body |= {"logprobs": True, "top_logprobs": 5} if path.endswith("chat/completions") else {"logprobs": 5, "echo": True}
    if i % 5 == 0:
        body["stop"] = ["\ud7ff", "ab"]
    if i % 7 == 1:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    return path, body


def _noise_round(noisy: Live, count: int) -> None:
    rng = random.Random(3)
    jobs = [_noise(rng, i) for i in range(count)]

    def one(i: int) -> str:
        path, body = jobs[i]
        if i % 4 < 2:
            return joined(stream(noisy.server.base, path, body))
        return text_of(whole(noisy.server.base, path, body)["choices"][0])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(one, range(count)))
    assert any("�" in text for text in texts), "no broken bytes came out: nothing was tested"
    noisy.assert_live()


def test_row_03_broken_bytes_become_replacement_characters(noisy: Live) -> None:
    _noise_round(noisy, 24)


@pytest.mark.slow
def test_row_03_broken_bytes_at_full_size(noisy: Live) -> None:
    _noise_round(noisy, 60)


@pytest.mark.parametrize("path", ROUTES)
def test_row_03_known_broken_bytes_are_equal_in_both_modes(server: Live, chain: Chain, path: str) -> None:
    wanted = SCRIPTS[3]
    assert isinstance(wanted, bytes)
    body = generation(path, chain.play(3), max_tokens=100)
    assert (
        text_of(whole(server.server.base, path, body)["choices"][0])
        == joined(stream(server.server.base, path, body))
        == wanted.decode("utf-8", "replace")
    )


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("max_tokens", [1, 500])
def test_row_06_events_on_a_raw_socket(server: Live, chain: Chain, path: str, max_tokens: int) -> None:
    body = generation(path, chain.play(0), max_tokens=max_tokens, stream=True, ignore_eos=True)
    with connect(server.server.base) as raw:
        raw.sendall(request_bytes(path, body))
        status, headers, content = RawReader(raw).reply()
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in headers["cache-control"]
    assert headers["x-accel-buffering"] == "no"
    assert headers.get("content-length") is None
    assert len(events_of(content)) >= 1


@pytest.mark.parametrize("max_tokens", [1, 300])
def test_row_06_the_official_client_reads_to_the_end(server: Live, chain: Chain, max_tokens: int) -> None:
    with openai.OpenAI(base_url=server.server.base + "/v1", api_key="none") as client:
        options: dict[str, Any] = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        chat = list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": chain.play(0)}], **options))
        plain = list(client.completions.create(model="m", prompt=chain.play(0), **options))
    for chunks in (chat, plain):
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == min(max_tokens, len(chain.pieces[0]) + 1)
        assert all(c.usage is None for c in chunks[:-1])
    text = "".join(c.choices[0].delta.content or "" for c in chat[:-1])
    assert text == "".join(c.choices[0].text for c in plain[:-1])
    assert max_tokens == 1 or text == UNICODE


def _check_ends(base: str, path: str, body: dict[str, Any], *, num_choices: int) -> None:
    reply = whole(base, path, body)
    for include_usage in (True, False):
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        events = stream(base, path, {**body, **options})
        if include_usage:
            *events, last = events
            assert last["choices"] == []
            counted = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert {k: last["usage"][k] for k in counted} == {k: reply["usage"][k] for k in counted}
        assert all(e["choices"] for e in events)
        assert all(not e.get("usage") for e in events)
        for index in range(num_choices):
            mine = [c for e in events for c in e["choices"] if c["index"] == index]
            assert finishes(events, index) == [reply["choices"][index]["finish_reason"]]
            assert mine[-1]["finish_reason"] is not None
            assert "".join(map(text_of, mine)) == text_of(reply["choices"][index])


@pytest.mark.parametrize("path", ROUTES)
def test_row_07_every_choice_ends_once_and_usage_is_the_same(noisy: Live, path: str) -> None:
    base = noisy.server.base
    stops = ["e", "\n", "q"]
    _check_ends(base, path, generation(path, "ab", n=3, seed=1, temperature=1.0, max_tokens=60, stop=stops), num_choices=3)
    _check_ends(base, path, generation(path, "ab", n=3, seed=1, temperature=1.0, max_tokens=5), num_choices=3)
    noisy.assert_exact()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("fields", "reason"), [({"stop": ["Condor"]}, "stop"), ({"max_tokens": 3}, "length"), ({"max_tokens": 90}, "stop")])
def test_row_07_stop_length_and_eos(server: Live, chain: Chain, path: str, fields: dict[str, Any], reason: str) -> None:
    body = generation(path, chain.play(1), **{"max_tokens": 50, **fields})
    _check_ends(server.server.base, path, body, num_choices=1)
    assert whole(server.server.base, path, body)["choices"][0]["finish_reason"] == reason


def test_row_07_two_prompts_at_once(server: Live, chain: Chain) -> None:
    body = {"prompt": [chain.play(1), chain.play(2)], "n": 2, "temperature": 0, "max_tokens": 60, "stop": ["Conclusion"]}
    _check_ends(server.server.base, "/v1/completions", body, num_choices=4)
    texts = [c["text"] for c in whole(server.server.base, "/v1/completions", body)["choices"]]
    assert texts == ["plan Condor "] * 2 + [str(SCRIPTS[2])] * 2
