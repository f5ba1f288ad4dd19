"""Rows SAMPLING, LOGPROB and CTX of the fault table on a real server: one bad value costs one request its answer, and nobody else anything."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from fixtures.granted import Granted
from fixtures.hf_forward import logprobs_of
from fixtures.live_server import Live, live, tiny_flags, tiny_llama
from fixtures.wire import ROUTES, HealthProbe, assert_refused, generation, joined, post, stream, strict_json, text_of, whole

pytestmark = pytest.mark.process

VOCAB = 272
L = 2048
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
NATIVE = "/generate"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("request"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Live]:
    with live(model, *tiny_flags(pool=8192, running=8)) as made:
        yield made


@pytest.fixture
def base(server: Live) -> Iterator[str]:
    """The address; afterwards the server must be LIVE."""
    yield server.server.base
    server.assert_live()


def ids_of(base: str, prompt: str, **sampling: Any) -> list[int]:
    """Greedy ids of `prompt` through the native route."""
    reply = post(base, NATIVE, {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True, **sampling}})
    assert reply.status_code == 200, reply.text
    return [int(i) for i in reply.json()["output_ids"]]


def variants(base: str, name: str, raw: str) -> Iterator[httpx.Response]:
    """`name: raw` put as raw JSON text into a request of each route."""
    yield post(base, PLAIN, f'{{"prompt":"a","max_tokens":2,"{name}":{raw}}}'.encode())
    yield post(base, CHAT, f'{{"messages":[{{"role":"user","content":"a"}}],"max_tokens":2,"stream":true,"{name}":{raw}}}'.encode())
    yield post(base, NATIVE, f'{{"text":"a","sampling_params":{{"max_new_tokens":2,"{name}":{raw}}}}}'.encode())


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_row_16_what_is_no_finite_number_names_the_parameter(base: str, name: str) -> None:
    for raw in ("NaN", "Infinity", "-Infinity", "1e999", '"0.7"', "true", "[]"):
        for response in variants(base, name, raw):
            assert name in str(assert_refused(response)["param"])
    assert [r.status_code for r in variants(base, name, "null")] == [200, 200, 200]


def test_row_16_a_bias_that_is_no_finite_number(base: str) -> None:
    for raw in ("NaN", "Infinity", "1e999", '"1"', "true", "[]"):
        for response in variants(base, "logit_bias", f'{{"5":{raw}}}'):
            assert "logit_bias" in str(assert_refused(response)["param"])


@pytest.mark.parametrize("path", ROUTES)
def test_row_17_tiny_temperatures_are_greedy(base: str, path: str) -> None:
    greedy = text_of(whole(base, path, generation(path, "hello", max_tokens=32, ignore_eos=True))["choices"][0])
    warm = generation(path, "other", max_tokens=32, ignore_eos=True, temperature=1.0, seed=7)
    alone = text_of(whole(base, path, warm)["choices"][0])
    bodies = [generation(path, "hello", max_tokens=32, ignore_eos=True, temperature=t, seed=1) for t in (1e-3, 1e-5, 1e-12, 5e-324)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda body: text_of(whole(base, path, body)["choices"][0]), [*bodies, *[warm] * 4]))
    assert texts[0] != ""
    assert texts[1:4] == [greedy] * 3
    assert texts[4:] == [alone] * 4
    assert_refused(post(base, path, generation(path, "hello", temperature=-0.1)), param="temperature")


def test_row_19_filters_at_their_edges(base: str) -> None:
    off = [VOCAB - 1, VOCAB, VOCAB + 1, 12345678, 2**31, 0, -1]
    for top_k in off:
        assert whole(base, PLAIN, {"prompt": "a", "max_tokens": 2, "top_k": top_k})["choices"]
    same = {ids_sampled(base, {"top_k": k}) for k in (VOCAB, VOCAB + 1, 2**31, 0, -1)}
    assert len(same) == 1  # at or above the vocabulary, 0 and -1: off
    for name, bad in (("top_k", (-2, 1.5)), ("top_p", (1.0001, 0, -0.1)), ("min_p", (1.1, -0.1))):
        for value in bad:
            assert_refused(post(base, PLAIN, {"prompt": "a", name: value}), param=name)
    for name, good in (("top_p", 1), ("min_p", 0), ("min_p", 1)):
        assert whole(base, PLAIN, {"prompt": "a", "max_tokens": 2, name: good})["choices"]


def ids_sampled(base: str, sampling: dict[str, Any]) -> tuple[int, ...]:
    return tuple(ids_of(base, "abc", temperature=1.0, sampling_seed=11, **sampling))


def test_row_19_a_huge_temperature_is_nearly_uniform(base: str) -> None:
    """Through the native route: OpenAI's documents bound the temperature by 2."""
    reply = post(base, NATIVE, {"text": "a", "sampling_params": {"temperature": 1e6, "max_new_tokens": 1, "n": 100, "ignore_eos": True}})
    more = [post(base, NATIVE, {"text": "a", "sampling_params": {"temperature": 1e6, "max_new_tokens": 1, "n": 100}}) for _ in range(2)]
    drawn = {item["output_ids"][0] for r in [reply, *more] for item in r.json()}
    assert len(drawn) > 100
    argmax = ids_of(base, "a", max_new_tokens=1)
    picky = post(
        base, NATIVE, {"text": "a", "sampling_params": {"temperature": 1e6, "top_k": 1, "max_new_tokens": 1, "n": 50, "ignore_eos": True}}
    ).json()
    assert {item["output_ids"][0] for item in picky} == set(argmax)


def test_row_20_logprobs_are_bounded(base: str) -> None:
    for top_n, want in ((0, 0), (20, 20)):
        entry = whole(base, CHAT, generation(CHAT, "a", max_tokens=1, logprobs=True, top_logprobs=top_n))["choices"][0]["logprobs"]["content"][0]
        assert len(entry["top_logprobs"]) == want
        assert entry["logprob"] <= 0.0
    for bad in (21, 5_000_000, -1):
        assert_refused(post(base, CHAT, generation(CHAT, "a", logprobs=True, top_logprobs=bad)), param="top_logprobs")
    assert_refused(post(base, CHAT, generation(CHAT, "a", top_logprobs=3)), param="top_logprobs")
    for top_n in (0, 5):
        found = whole(base, PLAIN, generation(PLAIN, "a", max_tokens=2, logprobs=top_n))["choices"][0]["logprobs"]
        assert len(found["token_logprobs"]) == 2
        assert ([len(top) for top in found["top_logprobs"]] if top_n else found["top_logprobs"]) == ([5, 5] if top_n else None)
    for bad in (21, 5_000_000, -1):
        assert_refused(post(base, PLAIN, generation(PLAIN, "a", logprobs=bad)), param="logprobs")
        assert_refused(post(base, NATIVE, {"text": "a", "return_logprob": True, "top_logprobs_num": bad}), param="top_logprobs_num")
    assert_refused(post(base, NATIVE, {"text": "a", "top_logprobs_num": 3}), param="top_logprobs_num")


def test_row_21_ids_outside_the_vocabulary(base: str) -> None:
    neighbour = ids_of(base, "neighbour")
    bad_bias: list[Any] = [{"99999999": 1}, {"-1": 1}, {"abc": 1}, {"1.5": 1}, {str(VOCAB): 1}, {"5": 101}, {"5": None}]
    bad_stop: list[Any] = [[VOCAB], [2**40], [-1], ["a"]]
    with ThreadPoolExecutor(3) as pool:
        for name, values in (("logit_bias", bad_bias), ("stop_token_ids", bad_stop)):
            for value in values:
                beside = [pool.submit(ids_of, base, "neighbour") for _ in range(3)]
                for path in ROUTES:
                    assert name in str(assert_refused(post(base, path, generation(path, "a", **{name: value})))["param"])
                assert [f.result() for f in beside] == [neighbour] * 3
    assert whole(base, PLAIN, generation(PLAIN, "a", max_tokens=2, logit_bias={str(VOCAB - 1): 1}))
    first = ids_of(base, "a", max_new_tokens=1)[0]
    stopped = ids_of(base, "a", stop_token_ids=[first], min_new_tokens=4, ignore_eos=False, max_new_tokens=30)
    assert first not in stopped[:4]
    assert len(stopped) > 4
    with Granted() as clock:
        assert whole(base, PLAIN, generation(PLAIN, "a", max_tokens=1, logit_bias={str(i % VOCAB): 1 for i in range(VOCAB)}))
        many = post(base, PLAIN, generation(PLAIN, "a", max_tokens=1, logit_bias={str(i): 1 for i in range(10_000)}))
        assert_refused(many)  # the vocabulary has no 10,000 tokens
        assert clock.now_s() < 1.0


@pytest.mark.parametrize("path", ROUTES)
def test_row_22_bans_and_forces_hold_everywhere_and_leak_nowhere(base: str, path: str) -> None:
    plain = ids_of(base, "hey")
    banned, forced = plain[0], next(i for i in range(97, 122) if i not in plain)

    def run(k: int) -> list[int]:
        bias = [{str(banned): -100}, {str(forced): 100}, {}, {str(forced + 1): 100}][k % 4]
        body = generation(path, "hey", max_tokens=20, ignore_eos=True, logit_bias=bias, return_token_ids=True)
        if k >= 4:
            return [i for e in stream(base, path, body) for c in e["choices"] for i in c.get("token_ids") or []]
        return list(whole(base, path, body)["choices"][0]["token_ids"])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(8)))
    for k, ids in enumerate(found):
        assert len(ids) == 20
        if k % 4 == 0:
            assert banned not in ids
        elif k % 4 == 2:
            assert ids == found[2]
        else:
            assert set(ids) == {forced + (k % 4 == 3)}
    if path == PLAIN:
        assert found[2] == plain


def memory_bytes(server: Live) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in [server.main_pid, *server.pids])


@pytest.mark.parametrize("path", ROUTES)
def test_row_24_huge_fan_outs_are_refused_at_once(base: str, server: Live, path: str) -> None:
    before = memory_bytes(server)
    with HealthProbe(base) as probe, Granted() as clock:
        for n in (0, -1, 1.5, 100_000, 2**31):
            begun_s = clock.now_s()
            assert_refused(post(base, path, generation(path, "a", n=n)), param="n")
            assert clock.now_s() - begun_s < 1.0
        if path == PLAIN:
            begun_s = clock.now_s()
            assert_refused(post(base, path, {"prompt": ["a"] * 50_000}), param="prompt")
            assert clock.now_s() - begun_s < 1.0
            assert_refused(post(base, path, {"prompt": "a", "n": 3, "best_of": 2}), param="best_of")
            assert_refused(post(base, path, {"prompt": "a", "n": 2, "best_of": 4}), status=(400, 501))
        assert len(whole(base, path, generation(path, "a", n=128, temperature=1, max_tokens=1))["choices"]) == 128
    assert probe.worst_s < 1.0
    assert memory_bytes(server) - before < 64 << 20


def test_row_26_prompts_without_tokens(base: str) -> None:
    for prompt in ("", [""], [], [[]], None):
        assert_refused(post(base, PLAIN, {"prompt": prompt, "max_tokens": 2}))
    assert_refused(post(base, PLAIN, {"max_tokens": 2}), param="prompt")
    assert_refused(post(base, PLAIN, {"prompt": ["a", ""], "max_tokens": 2}), param="prompt[1]")
    for body in ({"input_ids": []}, {"text": ""}, {"text": ["a", ""]}, {"input_ids": [[1], []]}):
        assert_refused(post(base, NATIVE, body))
    assert whole(base, CHAT, generation(CHAT, "", max_tokens=2))["choices"]  # the template's own tokens are a prompt


def test_row_27_prompts_as_token_ids(base: str) -> None:
    for prompt in ([VOCAB], [-1], [2**31], [2**63], [1.5], [True], ["1", 1], [[1, 2], [VOCAB]], [[1], "a"], [[1], 2], [1, [2]]):
        assert_refused(post(base, PLAIN, {"prompt": prompt, "max_tokens": 2}))
    for ids in ([VOCAB], [-1], [2**63], [1.5], [True], ["1"], [[1], [-1]]):
        assert_refused(post(base, "/detokenize", {"tokens": ids}))
        assert_refused(post(base, NATIVE, {"input_ids": ids}))
    assert whole(base, PLAIN, {"prompt": [VOCAB - 1], "max_tokens": 2})["choices"]  # a padding id is in range
    lists = [post(base, "/tokenize", {"prompt": text}).json()["tokens"] for text in ("ab", "c")]
    as_ids = whole(base, PLAIN, {"prompt": lists, "max_tokens": 8, "temperature": 0})["choices"]
    as_text = whole(base, PLAIN, {"prompt": ["ab", "c"], "max_tokens": 8, "temperature": 0})["choices"]
    assert [c["text"] for c in as_ids] == [c["text"] for c in as_text]
    assert [c["index"] for c in as_ids] == [0, 1]


PROMPTS = ["a", "hello", "naïve café", "日本語の", "a😀b", "tab\tand\nline", "0123456789" * 3, "  two  ", "e\u0301", "ไทย"]


def _echo(base: str, prompt: str, *, streamed: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    body = {"prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache_salt": "row29"}
    if not streamed:
        reply = whole(base, PLAIN, body)
        return reply["choices"][0]["text"], reply["choices"][0]["logprobs"], reply["usage"]
    events = stream(base, PLAIN, {**body, "stream_options": {"include_usage": True}})
    parts = [c["logprobs"] for e in events for c in e["choices"] if c["logprobs"]]
    return joined(events), {key: [x for p in parts for x in p[key]] for key in parts[0]}, events[-1]["usage"]


def test_row_29_echo_with_logprobs_is_true_cold_warm_and_streamed(base: str, model: Path) -> None:
    for prompt in PROMPTS:
        ids = post(base, "/tokenize", {"prompt": prompt}).json()["tokens"]
        cold = _echo(base, prompt, streamed=False)
        for text, found, usage in (cold, _echo(base, prompt, streamed=False), _echo(base, prompt, streamed=True)):
            assert len(found["token_logprobs"]) == usage["prompt_tokens"] + usage["completion_tokens"] == len(ids) + 1
            assert [i for i, x in enumerate(found["token_logprobs"]) if x is None] == [0]
            assert text.startswith(prompt)
            assert found == cold[1]
            assert text == cold[0]
        offsets, text = cold[1]["text_offset"], cold[0]
        assert offsets == sorted(offsets)
        assert offsets[0] == 0
        assert offsets[-1] <= len(text)
        if all(ord(c) < 128 for c in text):
            assert "".join(cold[1]["tokens"]) == text
            assert all(text.startswith(token, at) for token, at in zip(cold[1]["tokens"], offsets, strict=True))
        reference = logprobs_of(model, ids)
        ours = np.array(cold[1]["token_logprobs"][1 : len(ids)], dtype=np.float64)
        np.testing.assert_allclose(ours, [reference[i - 1][ids[i]] for i in range(1, len(ids))], atol=1e-3)


@pytest.mark.parametrize(
    "fields", [{"top_k": 1, "temperature": 1}, {"logit_bias": {str(i): -100 for i in range(200)}}, {"allowed_token_ids": [65, 66]}]
)
def test_row_30_minus_infinity_is_strict_json(base: str, fields: dict[str, Any]) -> None:
    for path in ROUTES:
        wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5, "echo": True}
        body = generation(path, "abc", max_tokens=4, ignore_eos=True, **{**wanted, **fields})
        for choice in [whole(base, path, body)["choices"][0], *[c for e in stream(base, path, body) for c in e["choices"] if c["logprobs"]]]:
            chosen = [e["logprob"] for e in choice["logprobs"]["content"]] if path == CHAT else choice["logprobs"]["token_logprobs"]
            assert all(x is None or np.isfinite(x) for x in chosen)


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_row_32_one_length_rule_everywhere(base: str, as_ids: bool, stream_it: bool) -> None:
    def ask(length: int, **fields: Any) -> httpx.Response:
        return post(
            base, PLAIN, {"prompt": [97] * length if as_ids else "q" * length, "temperature": 0, "ignore_eos": True, "stream": stream_it, **fields}
        )

    fits = ask(L - 1, max_tokens=5)
    assert fits.status_code == 200
    assert '"finish_reason":"length"' in fits.text
    for length in (L, L + 1, 10 * L):
        error = assert_refused(ask(length, max_tokens=1), param="prompt", code="context_length_exceeded")
        assert str(L) in error["message"]
    for fields in ({"max_tokens": 100}, {}):
        near = ask(L - 5, **fields, **({"stream_options": {"include_usage": True}} if stream_it else {}))
        assert near.status_code == 200
        assert '"completion_tokens":5' in near.text
        assert '"finish_reason":"length"' in near.text


def test_row_32_chat_and_batches_follow_the_same_rule(base: str) -> None:
    room = L - len(post(base, "/tokenize", {"messages": [{"role": "user", "content": ""}]}).json()["tokens"])
    for fields in ({"max_tokens": 100}, {"max_completion_tokens": 100}, {"max_tokens": 100, "max_completion_tokens": 100}, {}):
        reply = whole(base, CHAT, generation(CHAT, "q" * (room - 5), ignore_eos=True, **fields))
        assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (5, "length")
    for streamed in (False, True):
        error = assert_refused(post(base, CHAT, generation(CHAT, "q" * room, stream=streamed)), param="messages", code="context_length_exceeded")
        assert str(L) in error["message"]
        batch = {"prompt": ["a", "b", "q" * (L + 10), "d"], "max_tokens": 2, "stream": streamed}
        with Granted() as clock:
            assert_refused(post(base, PLAIN, batch), param="prompt[2]", code="context_length_exceeded")
            assert clock.now_s() < 2.0


def test_row_32_a_text_of_megabytes_is_refused_at_once(base: str) -> None:
    """Tokenizing 4.8 MB took 42 s before the refusal."""
    text = "lorem ipsum " * 400_000
    with HealthProbe(base) as probe, Granted() as clock:
        for path in ROUTES:
            begun_s = clock.now_s()
            error = assert_refused(post(base, path, generation(path, text)), code="context_length_exceeded")
            assert "at least" in error["message"]
            assert clock.now_s() - begun_s < 2.0
    assert probe.worst_s < 1.0


def test_idle_and_strict_at_the_end(server: Live) -> None:
    assert strict_json(server.server.get("/debug/state"))
    server.assert_exact()
    server.assert_flushes()
