"""The fake executor itself: it must notice what it exists to notice, and draw what the definition says."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.script import EOS, VOCAB, prompt_of
from rootlet.core.hash_lm import HashLM, HashModel, reference_generate
from rootlet.core.sampling_params import SamplingParams
from rootlet.core.step import RELAY, Capacity, ControlOp, PageDelta, RowInit, StepPlan
from rootlet.core.types import ForwardMode, LogprobSpec

P = 4
CAPACITY = Capacity(num_pages=8, page_size=P, max_rows=3, max_context_len=32, max_step_tokens=32, vocab_size=VOCAB)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def step(number: int, start: int, ids: list[int], **changes: object) -> StepPlan:
    """One row: row 1 on pages 5, 6, 7, ...; `start` 0 initialises it."""
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    fields = {
        "step": number,
        "mode": ForwardMode.EXTEND,
        "rids": ("r",),
        "epochs": ints(0),
        "pool_rows": ints(1),
        "prefix_lens": ints(start),
        "extend_lens": ints(len(ids)),
        "sample": np.array([True]),
        "input_ids": ints(*ids),
        "positions": positions,
        "out_cache_loc": (5 + positions // P) * P + positions % P,
        **changes,
    }
    return StepPlan(**fields)  # type: ignore[arg-type]


def first_step(prompt: list[int], **params: object) -> StepPlan:
    init = RowInit(1, "r", SamplingParams(seed=3, **params), (EOS,), ints(*prompt), ints(), LogprobSpec(top_n=1))  # type: ignore[arg-type]
    return step(0, 0, prompt, page_deltas=(PageDelta(1, 0, ints(5, 6, 7)),), row_inits=(init,))


def test_two_steps_give_what_the_definition_says() -> None:
    lm, prompt = HashLM(CAPACITY), prompt_of(5)
    lm.submit(first_step(prompt))
    lm.submit(step(1, 5, [RELAY]))
    got = [lm.collect().rows[0], lm.collect().rows[0]]
    want = reference_generate(lm.model, prompt, SamplingParams(seed=3), max_new_tokens=2, logprobs=LogprobSpec(top_n=1))
    assert [r.tokens[0] for r in got] == want.tokens
    assert [r.logprobs[0] for r in got] == want.logprobs


def test_logprobs_are_a_softmax() -> None:
    model = HashModel(VOCAB)
    logits = model.logits(17)
    entry = model.logprob(logits, 9, LogprobSpec(top_n=VOCAB))
    assert entry.logprob == pytest.approx(float(logits[9] - np.log(np.exp(logits).sum())))
    assert sum(np.exp(entry.top_logprobs)) == pytest.approx(1.0)
    assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)


def test_eos_comes_about_as_often_as_asked() -> None:
    model = HashModel(VOCAB, eos_id=EOS, eos_rate=0.25)
    share = sum(int(np.argmax(model.logits(h))) == EOS for h in range(2000)) / 2000
    assert 0.2 < share < 0.3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"input_ids": ints(9)}, "differ from its history"),
        ({"input_ids": ints(9), "prefix_lens": ints(3), "positions": ints(3)}, "differ from its history"),
        ({"out_cache_loc": ints(4 * 3 + 1)}, "not what the page table says"),
        ({"positions": ints(4)}, "positions of r"),
        ({"rids": ("other",)}, "belongs to r"),
        ({"pool_rows": ints(2)}, "never initialised"),
        ({"out_cache_loc": ints(0)}, "padding page"),
        ({"page_deltas": (PageDelta(1, 0, ints(3)),)}, "slots hold positions"),
    ],
)
def test_wrong_plans_are_noticed(changes: dict[str, object], message: str) -> None:
    lm = HashLM(CAPACITY)
    lm.submit(first_step(prompt_of(5)))
    with pytest.raises(AssertionError, match=message):
        lm.submit(step(1, 5, [RELAY], **changes))


def test_poison_takes_effect_after_the_plans_submitted_before_it() -> None:
    lm = HashLM(CAPACITY, mode="late")
    lm.submit(first_step(prompt_of(5)))
    lm.submit(step(1, 5, [RELAY]))
    lm.poison([5])
    lm.submit(step(2, 6, [RELAY]))
    assert lm.collect().rows[0].tokens
    assert lm.collect().rows[0].tokens
    with pytest.raises(AssertionError, match="slots hold positions"):
        lm.collect()


def test_flush_forgets_rows() -> None:
    lm = HashLM(CAPACITY)
    lm.submit(first_step(prompt_of(5)))
    assert lm.control(ControlOp("flush"))["plans_run"] == 1
    with pytest.raises(AssertionError, match="never initialised"):
        lm.submit(step(1, 5, [RELAY]))
    lm.close()


def test_reference_has_penalties_bias_and_choices() -> None:
    model = HashModel(VOCAB)
    prompt = prompt_of(6)

    def tokens(**params: object) -> list[int]:
        return reference_generate(model, prompt, SamplingParams(seed=1, **params), max_new_tokens=30).tokens  # type: ignore[arg-type]

    assert set(tokens(logit_bias={9: 100.0})) == {9}
    assert 9 not in tokens(logit_bias={9: -100.0}, temperature=2.0)
    assert len(set(tokens(frequency_penalty=2.0, presence_penalty=2.0, temperature=0.0))) > 10
    assert set(tokens(allowed_token_ids=(7, 8))) <= {7, 8}
    assert tokens(temperature=0.0) == tokens(temperature=0.0, choice_index=3) == tokens(top_k=1)
    assert tokens() != tokens(choice_index=1)
