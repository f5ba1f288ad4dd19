"""The invisible switches (architecture section 8) on the hash LM: exact, token by token, then logprob by logprob.

Every `tokens_of` also compares each reply with the definition, so "equal" here is equality with the request alone on an empty server.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from fixtures.script import LogprobSpec, Script, generate, prompt_of, tokens_of
from rootlet.config.schema import CacheArgs
from rootlet.core.types import Phase
from rootlet.ipc.messages import AbortReq, TokenizedGenerateReqInput
from rootlet.scheduler.state import retract_req

P = 4


def family(n: int = 5, max_new: int = 7):
    """Requests of mixed lengths and kinds that share a beginning."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"repetition_penalty": 1.4, "temperature": 0.0},
        {"logit_bias": {7: 6.0}, "min_new_tokens": 3},
        {"allowed_token_ids": tuple(range(2, 20)), "top_k": 5},
    ]
    return [generate(f"r{i}", prompt_of(5 + 6 * i, i, shared=9), max_new, **kinds[i % len(kinds)]) for i in range(n)]


def test_batched_equals_alone() -> None:
    together = tokens_of(family(6), eos_rate=0.1)
    for msg in family(6):
        assert tokens_of([msg], eos_rate=0.1)[msg.rid] == together[msg.rid]


def test_any_batch_order() -> None:
    want = tokens_of(family(4))
    for order in permutations(family(4)):
        assert tokens_of(list(order)) == want


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("chunk", [16, 17, 18, 31, 32, 33, 50, 0])
def test_chunked_equals_whole_at_every_size_and_alignment(page_size: int, chunk: int) -> None:
    """Also F3."""
    for length in (1, 15, 16, 17, 33, 64, 65):
        script = Script(page_size=page_size, num_pages=256 // page_size, chunked_prefill=chunk).run(generate("r", prompt_of(length), 5))
        script.check_all_replies()
        if chunk:
            assert max(p.num_tokens for p in script.plans) <= chunk


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_cached_equals_uncached_around_page_edges(page_size: int) -> None:
    edges = sorted({max(k * page_size + d, 1) for k in (0, 1, 2, 3) for d in (-1, 0, 1)})
    for first in edges:
        for second in edges[edges.index(first) :]:
            script = Script(page_size=page_size, num_pages=128)
            script.run(generate("a", prompt_of(first), 1)).run(generate("b", prompt_of(second), 3))
            script.check_all_replies()
            # All of prompt a is in the tree, page floor; of b at least the last token is computed.
            assert script.replies["b"].cached_len == min(first, second - 1) // page_size * page_size


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_full_hit_computes_the_last_token_only_down_to_the_page_floor(page_size: int) -> None:
    for length in (page_size, 2 * page_size, 2 * page_size + 1, 3 * page_size - 1):
        script = Script(page_size=page_size, num_pages=128).run(generate("a", prompt_of(length), 1))
        first_plans = len(script.plans)
        script.run(generate("b", prompt_of(length), 1))
        computed = script.plans[first_plans].num_tokens
        assert computed == length - (length - 1) // page_size * page_size
        assert 1 <= computed <= page_size
        script.check_all_replies()


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize("mixed", [False, True])
def test_depths_one_two_three_are_equal(mode: str, mixed: bool) -> None:
    runs = [tokens_of(family(6, 12), depth=d, mode=mode, mixed_chunk=mixed, eos_rate=0.1, chunked_prefill=16, max_running=3) for d in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]


def test_overlap_leaves_the_same_cache_behind() -> None:
    trees = [Script(depth=d, eos_rate=0.2).run(generate("r", prompt_of(10), 30)).scheduler.state.kv.ledger() for d in (1, 2, 3)]
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_retracted_at_every_step_and_mid_chunk(depth: int, page_size: int) -> None:
    """C2, C4, C7, C8: at each turn of its life, once, and twice in a row; in the middle of chunks and of re-prefill chunks too."""
    phases: set[Phase] = set()
    for when in range(1, 16):
        script = Script(depth=depth, page_size=page_size, chunked_prefill=8, num_pages=96 // page_size, cache=CacheArgs(prefix_cache=when % 2 == 0))
        msgs = [generate("a", prompt_of(30), 9, logprobs=LogprobSpec(top_n=2, prompt_start=3)), generate("b", prompt_of(9, 1), 9)]
        script.turn(*msgs)
        for t in range(1, 60):
            if script.scheduler.idle:
                break
            for req in list(script.scheduler.state.queues.holders()):
                if t in (when, when + 2):
                    phases.add(req.phase)
                    retract_req(script.scheduler.state, req)
            script.turn()
        script.run()
        script.check_all_replies()
    assert phases == {Phase.PREFILL, Phase.DECODE}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_forced_retraction_changes_nothing(depth: int, every: int) -> None:
    want = tokens_of(family(5, 15), eos_rate=0.05)
    script = Script(depth=depth, retract_every=every, eos_rate=0.05).run(*family(5, 15))
    script.check_all_replies()
    assert {rid: r.tokens for rid, r in script.replies.items()} == want
    assert script.scheduler.state.counters.retractions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_mixed_equals_unmixed(depth: int) -> None:
    """D8."""
    runs = []
    for mixed in (False, True):
        script = Script(depth=depth, mixed_chunk=mixed, chunked_prefill=16)
        for msg in family(6, 12):
            script.turn(msg)
            script.turn()
        script.run()
        script.check_all_replies()
        assert (script.scheduler.state.counters.mixed_steps > 0) == mixed
        runs.append({rid: r.tokens for rid, r in script.replies.items()})
    assert runs[0] == runs[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_n_parallel_samples_equal_n_singles_and_share_one_prefill(depth: int) -> None:
    prompt, n = prompt_of(41), 5

    def choices(parent: str | None):
        return [generate(f"c{i}", prompt, 6, temperature=1.0, choice_index=i, seed=9, parent_rid=parent if i else None) for i in range(n)]

    script = Script(depth=depth).run(*choices("c0"))
    script.check_all_replies()
    singles = {f"c{i}": tokens_of([choices(None)[i]])[f"c{i}"] for i in range(n)}
    assert {rid: r.tokens for rid, r in script.replies.items()} == singles
    assert len({tuple(t) for t in singles.values()}) > 1
    prefilled = sum(int(p.extend_lens.sum()) for p in script.plans if p.mode.name == "EXTEND")
    assert prefilled == len(prompt) + (n - 1) * (len(prompt) - 40)


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_one_request_are_retracted_alone_and_aborted_together(depth: int) -> None:
    def choices() -> list[TokenizedGenerateReqInput]:
        return [generate(f"c{i}", prompt_of(30), 10, temperature=1.0, choice_index=i, seed=9, parent_rid="c0" if i else None) for i in range(4)]

    for at in range(1, 12):
        script = Script(depth=depth, chunked_prefill=16)
        script.turn(*choices())
        for _ in range(at):
            script.turn()
        state = script.scheduler.state
        victim = next((r for r in state.queues.holders()), None)
        if victim is not None:
            retract_req(state, victim)
            assert sum(r.times.num_retractions for r in state.queues.by_rid.values()) == 1
        script.run()
        script.check_all_replies()
        script = Script(depth=depth, chunked_prefill=16)
        script.turn(*choices())
        for _ in range(at):
            script.turn()
        script.run(*(AbortReq(rid=f"c{i}") for i in range(4)))
        script.check_all_replies()
        assert script.turns <= at + 4, "nobody of them goes on"


@pytest.mark.parametrize("stream", [False, True])
def test_stream_concatenated_is_the_whole_reply(stream: bool) -> None:
    """C5, C6: tokens and logprobs arrive once, in order, whatever the bites."""
    msgs = [generate(f"r{i}", prompt_of(6, i), 40, stream=stream, logprobs=LogprobSpec(top_n=1)) for i in range(3)]
    script = Script(retract_every=3, depth=2).run(*msgs)
    script.check_all_replies()
    bites = len(script.replies["r0"].outputs)
    assert bites == 40 if stream else bites == 4  # the first token at once, then 16, 16 and the rest


def test_cache_off_changes_nothing() -> None:
    assert tokens_of(family(6), cache=CacheArgs(prefix_cache=False)) == tokens_of(family(6))
