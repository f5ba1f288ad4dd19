"""A record of a busy scheduler replays to the same plans, line by line; a record that was tampered with does not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fixtures.script import EOS, VOCAB, generate, prompt_of
from rootlet.cli.replay import replay as replay_command
from rootlet.config.schema import CacheArgs, SchedulerArgs
from rootlet.core.clock import VirtualClock
from rootlet.core.errors import BadConfig
from rootlet.core.hash_lm import HashLM, HashModel
from rootlet.core.step import Capacity
from rootlet.core.types import LogprobSpec
from rootlet.ipc.messages import AbortReq, BatchTokenIDOutput, FlushCacheReq, GetStateReq, PauseReq, PinReq, ShutdownReq, TokenizedGenerateReqInput
from rootlet.scheduler.record import Plan, Recorder, RecordingClock, RecordingExecutor, Turn, head_of, run
from rootlet.scheduler.replay import read, replay
from rootlet.scheduler.scheduler import Scheduler, Sinks

CAPACITY = Capacity(num_pages=40, page_size=4, max_rows=6, max_context_len=160, max_step_tokens=64, vocab_size=VOCAB)


def load(rng: random.Random, clock: VirtualClock, num_turns: int) -> Iterator[list[Any]]:
    """Messages of each turn: requests of all kinds, aborts, pauses, pins, time limits; time passes unevenly."""
    sent = 0
    for _ in range(num_turns):
        clock.advance(rng.choice([0.001, 0.01, 0.3]))
        messages: list[Any] = []
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            prompt = prompt_of(rng.randrange(1, 90), rng.randrange(3), shared=16)
            messages.append(
                generate(
                    f"r{sent}", prompt, rng.randrange(0, 30), priority=rng.choice([0, 0, 30]), user=rng.choice(["a", "b"]), temperature=0.8,
                    deadline_s=rng.choice([None, None, 1.0]), logprobs=rng.choice([None, LogprobSpec(top_n=1, prompt_start=0)]),
                )
            )  # fmt: skip
            sent += 1
        if sent and rng.random() < 0.2:
            rid = f"r{rng.randrange(sent)}"
            other = [AbortReq(rid), PinReq("p", "pin", input_ids=messages[0].input_ids if messages else b"", ttl_s=0.5), GetStateReq("s", "request")]
            messages.append(rng.choice([*other, PauseReq("p", paused=True, mode="retract"), FlushCacheReq("f", 1.0)]))
            messages.append(PauseReq("p", paused=False))
        yield messages
    yield [PauseReq("p", paused=False), ShutdownReq(drain_s=2.0)]
    while True:
        clock.advance(0.01)
        yield []


def record(path: Path, *, depth: int, seed: int = 1, turns: int = 120, logs: bool = False, **args: Any) -> int:
    """Run a load with a recorder; the number of plans."""
    clock, source = VirtualClock(), HashLM(CAPACITY, model=HashModel(vocab_size=VOCAB, eos_id=EOS, eos_rate=0.05), mode="late")
    scheduler_args = SchedulerArgs(**{"chunked_prefill": 16, "depth": str(depth), "record": str(path), **args})
    recorder = Recorder(path, head_of(source, scheduler_args, CacheArgs(), eos_token_ids=(EOS,), logs=logs, retract_every=7))
    outputs: list[BatchTokenIDOutput] = []
    scheduler = Scheduler(
        executor=RecordingExecutor(source, recorder),
        scheduler_args=scheduler_args,
        cache_args=CacheArgs(),
        eos_token_ids=(EOS,),
        clock=RecordingClock(clock, recorder),
        sinks=Sinks(outputs.append, lambda message: None, (lambda entry: None) if logs else None),
        retract_every=7,
    )
    messages = load(random.Random(seed), clock, turns)
    run(scheduler, lambda timeout_s: next(messages), depth)
    return scheduler.state.step


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "vtc", "random", "hrrn"])
def test_a_record_under_load_replays_with_zero_differing_plans(tmp_path: Path, policy: str, depth: int) -> None:
    plans = record(tmp_path / "r", depth=depth, schedule_policy=policy, logs=policy == "vtc")
    assert plans > 100
    outcome = replay(tmp_path / "r")
    assert outcome.differing == []
    assert outcome.plans == plans


def edited(path: Path, change: Any) -> Path:
    """A copy of a record with its lines changed."""
    lines = change(read(path))
    copy = path.with_suffix(".edited")
    copy.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return copy


def test_another_arrival_makes_another_plan_and_the_first_difference_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "r", depth=1)

    def lose_a_message(lines: list[Any]) -> list[Any]:
        at = next(
            i
            for i, line in enumerate(lines)
            if isinstance(line, Turn) and line.n > 20 and any(isinstance(m, TokenizedGenerateReqInput) for m in line.messages)
        )
        return [*lines[:at], msgspec.structs.replace(lines[at], messages=()), *lines[at + 1 :]]

    copy = edited(tmp_path / "r", lose_a_message)
    outcome = replay(copy)
    ((number, recorded, mine),) = outcome.differing
    assert recorded != mine
    assert outcome.plans == number
    assert replay_command(copy) == 1
    assert f"plan {number} differs" in capsys.readouterr().out
    assert replay_command(tmp_path / "r") == 0
    assert ", 0 differing" in capsys.readouterr().out


def test_code_that_reads_the_clock_less_often_falls_in_step_at_the_next_line(tmp_path: Path) -> None:
    """Request lines read the clock; a replay without them still sees each turn begin at its time."""
    record(tmp_path / "r", depth=1, logs=True)
    outcome = replay(edited(tmp_path / "r", lambda lines: [msgspec.structs.replace(lines[0], logs=False), *lines[1:]]))
    assert outcome.differing == []
    assert outcome.plans > 100


def test_a_plan_too_many_or_too_few_is_a_difference(tmp_path: Path) -> None:
    record(tmp_path / "r", depth=2, turns=60)

    def extra(lines: list[Any]) -> list[Any]:
        at = next(i for i, line in enumerate(lines) if isinstance(line, Plan))
        return [*lines[: at + 1], lines[at], *lines[at + 1 :]]

    def fewer(lines: list[Any]) -> list[Any]:
        at = next(i for i, line in enumerate(lines) if isinstance(line, Plan))
        return [*lines[:at], *lines[at + 1 :]]

    assert replay(edited(tmp_path / "r", extra)).differing
    assert replay(edited(tmp_path / "r", fewer)).differing


@pytest.mark.parametrize("depth", [1, 2])
def test_a_record_that_breaks_off_anywhere_replays_up_to_there(tmp_path: Path, depth: int) -> None:
    record(tmp_path / "r", depth=depth, turns=40)
    whole = (tmp_path / "r").read_bytes()
    for cut in range(len(whole) // 3, len(whole), 2999):
        (tmp_path / "cut").write_bytes(whole[:cut])
        outcome = replay(tmp_path / "cut")
        assert (outcome.differing, outcome.cut) == ([], whole[cut - 1 : cut] != b"\n"), cut


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\n", b'{"type":"turn","n":1}\n'])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(BadConfig):
        replay(tmp_path / "r")
    with pytest.raises(BadConfig, match="No such file"):
        replay(tmp_path / "none")
    with pytest.raises(BadConfig, match="--record"):
        Recorder(tmp_path / "no" / "folder", read_head())


def read_head() -> Any:
    return head_of(HashLM(CAPACITY), SchedulerArgs(depth="1"), CacheArgs(), eos_token_ids=(EOS,), logs=False)
