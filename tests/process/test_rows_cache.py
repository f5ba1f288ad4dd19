"""Rows CACHE (51, 53, 54, 55) and CHUNK (56) of the fault table on real servers: what a hit may change (the time) and may not (the tokens)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.live_server import Live, Reply, Solo, body, live, prompt, tiny_flags, tiny_llama

pytestmark = pytest.mark.process

slow = pytest.mark.slow
SERVED = "served"


class Families:
    """Checkpoints and their solo runs, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._solos: dict[tuple[str, int], Solo] = {}
        self._models: dict[str, Path] = {}

    def get(self, family: str, page: int) -> tuple[Path, Solo]:
        if family not in self._models:
            self._models[family] = tiny_llama(self._folder / family, family)
        kernels = 1 if page == 1 else 16  # pages that native attention takes give the same bits
        return self._models[family], self._solos.setdefault((family, kernels), Solo(self._models[family], kernels))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tiny(families: Families) -> Iterator[Live]:
    with live(families.get("llama", 16)[0], *tiny_flags(), "--depth", "2", "--served-model-name", f"{SERVED},other") as server:
        yield server


# ---- rows 51, 54: what is not offered is refused; what separates users separates their KV -----------------------------------------------------


@pytest.mark.parametrize(
    ("route", "request_body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/generate", {"text": "x"}),
    ],
)
def test_row_51_an_adapter_is_refused_never_ignored(tiny: Live, route: str, request_body: dict[str, Any]) -> None:
    url = tiny.server.base + route
    refused = httpx.post(url, json={**request_body, "lora_path": "x"}, timeout=60.0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (501, "lora_path")
    if route != "/generate":
        unknown = httpx.post(url, json={**request_body, "model": f"{SERVED}:x"}, timeout=60.0)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    tiny.assert_exact()


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_row_51_one_prompt_under_two_names_shares_no_kv(tiny: Live, name: str) -> None:
    ids = prompt(100, 51)
    tiny.server.get("/flush_cache?timeout=5")
    asked = [{**body(ids, 8), **({name: value} if value else {})} for value in ("", "a", "b", "a", "")]
    replies = tiny.one_by_one(*asked)
    assert [reply.one.meta["cached_tokens"] for reply in replies] == [0, 0, 0, 96, 96]
    assert len({tuple(reply.one.ids) for reply in replies}) == 1


def test_row_54_an_image_is_refused_not_read_as_equal_placeholders(tiny: Live) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    request = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, image]}], "max_tokens": 4}
    reply = httpx.post(f"{tiny.server.base}/v1/chat/completions", json=request, timeout=60.0)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("messages")
    tiny.assert_live()


# ---- row 53: the counts ----------------------------------------------------------------------------------------------------------------------


def counts(server: Live) -> dict[str, float]:
    metrics = server.metrics()
    return {
        "prompt": metrics["rootlet_prompt_tokens_total"],
        "cached": metrics.get('rootlet_cached_tokens_total{tier="device"}', 0.0),
        "scheduler's prompt": metrics['rootlet_scheduler_state{key="counters.prompt_tokens"}'],
        "scheduler's cached": metrics['rootlet_scheduler_state{key="counters.cached_tokens"}'],
    }


def grown(server: Live, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counts(server).items()}


def test_row_53_hits_are_counted_once_and_as_reported(tiny: Live) -> None:
    tiny.server.get("/flush_cache?timeout=5")
    before = counts(tiny)
    replies = tiny.one_by_one(*[body(prompt(160, 53), 5, stream=i % 2 == 0) for i in range(5)])
    cached = [reply.one.meta["cached_tokens"] for reply in replies]
    assert cached == [0, 144, 144, 144, 144]  # the last token is always computed, so the tenth page is not taken
    assert [reply.one.meta["cached_tokens_details"] for reply in replies] == [{"device": c, "host": 0, "storage": 0} for c in cached]
    assert grown(tiny, before) == {"prompt": 800, "cached": 576, "scheduler's prompt": 800, "scheduler's cached": 576}


def test_row_53_an_aborted_request_counts_what_it_hit(tiny: Live) -> None:
    tiny.one_by_one(body(prompt(160, 54), 5))
    before = counts(tiny)

    async def leave() -> None:
        async with tiny.session() as session, session.post("/generate", json=body(prompt(160, 54), 330, stream=True)) as response:
            await response.content.readline()

    asyncio.run(leave())
    tiny.assert_exact()
    assert grown(tiny, before) == {"prompt": 160, "cached": 144, "scheduler's prompt": 160, "scheduler's cached": 144}


def test_row_53_retraction_is_no_second_hit(tiny: Live) -> None:
    tiny.server.get("/flush_cache?timeout=5")
    before, retractions = counts(tiny), tiny.metrics()["rootlet_retractions_total"]
    replies = tiny.ask_together(*[body(prompt(32, 99) + prompt(40 + i, 5300 + i), 200, stream=True) for i in range(12)])
    assert tiny.metrics()["rootlet_retractions_total"] > retractions
    metas = [reply.one.meta for reply in replies]
    assert sum(meta["num_retractions"] for meta in metas) == tiny.metrics()["rootlet_retractions_total"] - retractions
    assert all(0 <= meta["cached_tokens"] <= 32 for meta in metas)  # no more than the part that is shared, however often it came back
    sums = {"prompt": float(sum(meta["prompt_tokens"] for meta in metas)), "cached": float(sum(meta["cached_tokens"] for meta in metas))}
    assert grown(tiny, before) == {**sums, "scheduler's prompt": sums["prompt"], "scheduler's cached": sums["cached"]}


# ---- row 55: around every page edge ----------------------------------------------------------------------------------------------------------


def edges(page: int, num_pages: int = 8) -> list[int]:
    return sorted({length for k in range(1, num_pages + 1) for length in (k * page - 1, k * page, k * page + 1) if length > 0})


def assert_equal_and_finite(replies: list[Reply], expected: list[Reply]) -> None:
    for reply, right in zip(replies, expected, strict=True):
        assert reply.drawn == right.drawn
        for choice in reply.choices:
            assert 0 <= choice.meta["cached_tokens"] <= choice.meta["prompt_tokens"] - 1
            assert all(math.isfinite(entry[0]) for entry in choice.logprobs)


@pytest.mark.parametrize(
    ("page", "depth", "num_pages"), [(1, "1", 3), (16, "2", 3), *(pytest.param(p, d, 8, marks=slow) for p in (1, 16, 32) for d in "12")]
)
def test_row_55_prompts_that_are_wholly_cached(families: Families, page: int, depth: str, num_pages: int) -> None:
    lengths = edges(page, num_pages)
    model, solo = families.get("llama", page)
    once = [body(prompt(length, length), 6, logprobs=2) for length in lengths]
    twice = [body(prompt(length, length), 6, n=2, temperature=0.7, seed=length) for length in lengths]
    longer = [body(prompt(length, length) + prompt(1 + i % 10, i), 6, logprobs=1) for i, length in enumerate(lengths)]
    right = solo.of([*once, *twice, *longer])
    alone, pairs, further = right[: len(once)], right[len(once) : -len(longer)], right[-len(longer) :]
    with live(model, *tiny_flags(page=page, chunk=page), "--depth", depth) as server:
        assert_equal_and_finite(server.one_by_one(*(request for request in once for _ in range(3))), [reply for reply in alone for _ in range(3)])
        assert_equal_and_finite(server.ask(*(request for request in once for _ in range(8)), at_once=8), [reply for reply in alone for _ in range(8)])
        assert_equal_and_finite(server.ask(*twice, at_once=8), pairs)
        assert_equal_and_finite(server.ask(*longer, at_once=8), further)
        server.assert_live()
        server.assert_flushes()


@pytest.mark.parametrize(("page", "depth", "num"), [(16, "2", 24), *(pytest.param(p, d, 64, marks=slow) for p in (1, 16, 32) for d in "12")])
def test_row_55_retracted_requests_return_to_their_cached_prefix(families: Families, page: int, depth: str, num: int) -> None:
    model, solo = families.get("llama", page)
    lengths = edges(page)
    requests = [body(prompt(lengths[i % len(lengths)], i % 5), 100, stream=i % 2 == 0, logprobs=1) for i in range(num)]
    expected = solo.of(requests)
    with live(model, *tiny_flags(page=page, chunk=page, running=16), "--depth", depth) as server:
        replies = server.ask_together(*requests)
        assert_equal_and_finite(replies, expected)
        assert all(len(reply.one.ids) == 100 for reply in replies)
        assert sum(reply.one.meta["num_retractions"] for reply in replies) == server.metrics()["rootlet_retractions_total"] > 0
        server.assert_live()
        server.assert_flushes()


# ---- row 56: chunked = whole -----------------------------------------------------------------------------------------------------------------

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 500)
CHUNKS = [
    ("llama", 16, 17, True), ("llama", 1, 17, True), ("mistral_swa", 16, 16, False),
    *(
        pytest.param(family, page, chunk, mixed, marks=slow)
        for family in ("llama", "mistral_swa", "qwen3")
        for page in (1, 16)
        for chunk in (1, 16, 17, 64, 0)
        for mixed in (False, True)
        if chunk == 0 or chunk >= page
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "page", "chunk", "mixed"), CHUNKS)
def test_row_56_chunks_change_nothing(families: Families, family: str, page: int, chunk: int, mixed: bool) -> None:
    model, solo = families.get(family, page)
    requests = [body(prompt(length, length), 64, logprobs=20) for length in LENGTHS]
    expected = solo.of(requests)
    flags = (
        *tiny_flags(ctx=2048, pool=4096, page=page, chunk=chunk, running=8),
        "--mixed-chunk" if mixed else "--no-mixed-chunk",
        "--no-prefix-cache",
    )
    with live(model, *flags, check=False) as server:
        assert_equal_and_finite(server.one_by_one(*requests), expected)
        assert_equal_and_finite(server.ask(*requests), expected)
        server.assert_live()


def test_row_56_page_sizes_agree(families: Families) -> None:
    """Native and reference attention round differently, but no more than that: top 20 within 1e-3, greedy tokens equal."""
    requests = [body(prompt(length, length), 64, logprobs=20) for length in LENGTHS]
    for one, other in zip(families.get("llama", 16)[1].of(requests), families.get("llama", 1)[1].of(requests), strict=True):
        assert one.one.ids == other.one.ids
        for here, there in zip(one.one.tops, other.one.tops, strict=True):
            by_id = {token: value for value, token, _ in there}
            assert all(abs(value - by_id.get(token, value)) < 1e-3 for value, token, _ in here)
