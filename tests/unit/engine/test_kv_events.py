"""KV events over real sockets: what a subscriber knows is what the cache holds, through gaps, drops and restarts. The subscriber is the page's."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fixtures.cache_bench import hash_path
from fixtures.granted import until
from fixtures.kv_subscriber import cached_paths, close, subscriber
from fixtures.script import Script, generate, prompt_of
from rootlet.cache.events import BlockRemoved, BlockStored, EventBatch
from rootlet.config.schema import CacheArgs
from rootlet.core.errors import BadConfig
from rootlet.engine.kv_events import kv_event_sink
from rootlet.ipc import kv_event_channel
from rootlet.ipc.kv_event_channel import END, Kept, KVEventPublisher
from rootlet.ipc.messages import FlushCacheReq

PAGE = 4
WAIT_MS = 60_000  # so that nothing hangs


class Held(KVEventPublisher):
    """Its thread begins when `go` is set."""

    go: threading.Event

    def _run(self) -> None:
        self.go.wait()
        super()._run()


@pytest.fixture
def args(tmp_path: Path) -> CacheArgs:
    return CacheArgs(kv_events=f"ipc://{tmp_path}/e", kv_events_replay=f"ipc://{tmp_path}/r")


@pytest.fixture
def connect() -> Iterator[Callable[[CacheArgs], Any]]:
    made: list[Any] = []

    def _connect(args: CacheArgs) -> Any:
        made.append(subscriber(str(args.kv_events), str(args.kv_events_replay)))
        return made[-1]

    yield _connect
    for blocks in made:
        close(blocks)


def joined(connect: Callable[[CacheArgs], Any], args: CacheArgs, play: Script) -> Any:
    """A subscriber to whom everything comes from now on: a subscription takes a moment to arrive."""
    blocks, numbers = connect(args), itertools.count()

    def heard() -> bool:
        i = next(numbers)
        play.run(generate(f"join{i}", prompt_of(PAGE + 1, i % 9), cache_salt=f"join{i}"))
        return bool(blocks.read(20))

    until(heard, "the subscriber hears", 60.0)
    hear(blocks, last_of(play))
    return blocks


def hear(blocks: Any, last: int) -> None:
    """Until batch `last` was taken."""
    while blocks.next <= last:
        assert blocks.read(WAIT_MS), f"batch {blocks.next} never came"


def in_cache(play: Script) -> set[int]:
    """The hashes of all blocks of the tree, by the definition, from whole token paths."""
    paths = list(cached_paths(play.scheduler.state.kv.cache.core.roots))
    return {int.from_bytes(block[-8:], "big") for space, path in paths for block in hash_path(space, path, PAGE)}


def last_of(play: Script) -> int:
    return play.scheduler.control.metrics()["kv_events"]["published_batches"] - 1


def test_a_subscriber_knows_what_the_cache_holds(args: CacheArgs, connect: Callable[[CacheArgs], Any]) -> None:
    with kv_event_sink(args) as sink:
        play = Script(num_pages=24, kv_events=sink)
        play.turn()
        assert asked(str(args.kv_events_replay), 0, want=1)[0][0] == 0, "the first batch says that nothing is cached"
        blocks = joined(connect, args, play)
        for i in range(12):  # three salts, common beginnings, more than fits
            salt = {"cache_salt": f"s{i % 3}"} if i % 3 else {}
            play.run(generate(f"r{i}", prompt_of(10 + i, i // 4, shared=6), 6, **salt))
            hear(blocks, last_of(play))
            assert set(blocks.parents) == in_cache(play)
        assert play.scheduler.control.metrics()["cache"]["evicted_pages"]
        assert blocks.parents
        play.run(FlushCacheReq("f", 0.0))
        hear(blocks, last_of(play))
        assert set(blocks.parents) == in_cache(play) == set()


def test_a_hit_is_foretold_from_the_events_alone(args: CacheArgs, connect: Callable[[CacheArgs], Any]) -> None:
    with kv_event_sink(args) as sink:
        play = Script(kv_events=sink).run(generate("a", prompt_of(21)))
        blocks = joined(connect, args, play)
        for name, prompt in (("b", prompt_of(21, 1, shared=14)), ("c", prompt_of(22)), ("d", prompt_of(30, 2)), ("e", prompt_of(9))):
            foretold = blocks.cached_len(prompt, PAGE)
            play.run(generate(name, prompt))
            assert play.replies[name].cached_len == foretold
            hear(blocks, last_of(play))


def test_a_gap_is_filled_from_the_replay_endpoint(args: CacheArgs, connect: Callable[[CacheArgs], Any]) -> None:
    with kv_event_sink(args) as sink:
        play = Script(num_pages=24, kv_events=sink)
        blocks = joined(connect, args, play)
        for i in range(6):
            play.run(generate(f"r{i}", prompt_of(15, i)))
        missed = [blocks.sub.recv_multipart()[1] for _ in range(3) if blocks.sub.poll(WAIT_MS)]
        assert [int.from_bytes(number, "big") - blocks.next for number in missed] == [0, 1, 2]
        hear(blocks, last_of(play))
        assert set(blocks.parents) == in_cache(play)


def test_what_can_no_longer_be_had_again_is_seen_and_nothing_stale_is_kept(
    args: CacheArgs, connect: Callable[[CacheArgs], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_channel, "REPLAY_BATCHES", 2)
    with kv_event_sink(args) as sink:
        assert sink is not None
        for sequence in range(5):
            sink.publish(EventBatch(sequence, (BlockStored((bytes([sequence]) * 32,), None, (sequence,), 1),)))
        assert [s for s, _ in asked(str(args.kv_events_replay), 3, want=2)] == [3, 4]
        blocks = connect(args)
        assert len(blocks.parents) == 2
        assert (blocks.next, blocks.cached_len([2], 1), blocks.cached_len([3], 1)) == (5, 0, 1)


def test_a_restart_is_noticed(args: CacheArgs, connect: Callable[[CacheArgs], Any]) -> None:
    with kv_event_sink(args) as sink:
        play = Script(kv_events=sink).run(generate("a", prompt_of(21)), generate("b", prompt_of(13, 1)))
        blocks = connect(args)
        assert set(blocks.parents) == in_cache(play)
    with kv_event_sink(args) as sink:
        again, numbers = Script(kv_events=sink), itertools.count()
        again.run(generate("a", prompt_of(9, 2)))

        def caught_up() -> bool:
            i = next(numbers)
            again.run(generate(f"x{i}", prompt_of(9, i)))
            while blocks.read(50):
                continue
            return set(blocks.parents) == in_cache(again)

        until(caught_up, "the subscriber, once connected again, forgets the blocks of the first server", 60.0)


def test_batches_beyond_the_waiting_room_are_dropped_counted_and_missing(args: CacheArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_channel, "MAX_WAITING", 4)
    Held.go = threading.Event()
    publisher = Held(str(args.kv_events), replay_endpoint=args.kv_events_replay)
    try:
        for sequence in range(50):
            publisher.publish(sequence, b"x")  # nobody takes them: each call returns at once
        assert publisher.published + publisher.dropped == 50
        assert 4 <= publisher.published <= 8
        kept = publisher.published
        Held.go.set()
        assert [s for s, _ in asked(str(args.kv_events_replay), 0, want=kept)] == list(range(kept))
        sequence = 50
        while publisher.published == kept:  # ZeroMQ notices the free room with some delay
            publisher.publish(sequence, b"y")
            sequence += 1
        assert [s for s, _ in asked(str(args.kv_events_replay), kept, want=1)] == [sequence - 1]
    finally:
        Held.go.set()
        publisher.close()


def asked(endpoint: str, sequence: int, *, want: int) -> list[tuple[int, bytes]]:
    """What the replay endpoint gives from `sequence` on, asked again until it is `want` batches."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        for _ in range(1000):
            socket.send_multipart([b"", sequence.to_bytes(8, "big")])
            found = []
            while True:
                assert socket.poll(WAIT_MS)
                frames = socket.recv_multipart()
                if frames == [b"", b"", END, b""]:
                    break
                empty, topic, number, payload = frames
                assert (empty, topic) == (b"", b"")
                found.append((int.from_bytes(number, "big"), payload))
            if len(found) == want:
                return found
    raise AssertionError(f"never {want} batches, lately {found}")


def test_strange_requests_for_a_replay_get_the_end_at_once(args: CacheArgs) -> None:
    with kv_event_sink(args) as sink, zmq.Context.instance().socket(zmq.DEALER) as socket:
        assert sink is not None
        sink.publish(EventBatch(0, ()))
        socket.linger = 0
        socket.connect(str(args.kv_events_replay))
        for request in ([b"", b"x"], [b"", b""], [b"", b"9" * 300], [b"", b"a", b"b" * 9]):
            socket.send_multipart(request)
            assert socket.poll(WAIT_MS)
            assert socket.recv_multipart() == [*request[:-1], b"", END, b""]
        assert [s for s, _ in asked(str(args.kv_events_replay), 0, want=1)] == [0]


def test_the_frames_and_the_payload_are_those_of_vllm(tmp_path: Path) -> None:
    args = CacheArgs(kv_events=f"ipc://{tmp_path}/e", kv_events_topic="kv@here")
    parent, block = hashlib.sha256(b"p").digest(), hashlib.sha256(b"b").digest()
    with kv_event_sink(args) as sink, zmq.Context.instance().socket(zmq.SUB) as sub:
        assert sink is not None
        sub.connect(str(args.kv_events))
        sub.subscribe(b"kv@")
        sequence = 7
        while not sub.poll(50):  # a subscription takes a moment to arrive, and what is sent before it is not for us
            sequence += 1
            sink.publish(EventBatch(sequence, (BlockStored((block,), parent, (5, 6), 2, "adapter"), BlockRemoved((parent,)))))
        topic, number, payload = sub.recv_multipart()
        time_s, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, int.from_bytes(number, "big") <= sequence, len(number), rank) == (b"kv@here", True, 8, 0)
    assert time_s > 1.7e9
    assert events == [
        {
            "type": "BlockStored", "block_hashes": [int(block.hex()[-16:], 16)], "parent_block_hash": int(parent.hex()[-16:], 16),
            "token_ids": [5, 6], "block_size": 2, "lora_id": None, "lora_name": "adapter", "medium": "GPU", "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"type": "BlockRemoved", "block_hashes": [int(parent.hex()[-16:], 16)], "medium": "GPU", "group_idx": 0},
    ]  # fmt: skip


@pytest.mark.parametrize(("events", "replay", "knob"), [
    ("tcp://no.such.host.invalid:1", None, "--kv-events "),
    ("ipc:///no/such/folder/x", None, "--kv-events "),
    ("", "tcp://nowhere", "--kv-events-replay "), ("", "ipc:///no/such/folder/x", "--kv-events-replay "),
])  # fmt: skip
def test_an_endpoint_that_cannot_be_had_names_its_knob(tmp_path: Path, events: str, replay: str | None, knob: str) -> None:
    args = CacheArgs(kv_events=events or f"ipc://{tmp_path}/e", kv_events_replay=replay)
    for _ in range(2):  # and nothing of the first attempt stays behind
        with pytest.raises(BadConfig, match=knob), kv_event_sink(args):
            pass
    with kv_event_sink(CacheArgs(kv_events=f"ipc://{tmp_path}/e")):
        pass


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    args = CacheArgs(kv_events=f"ipc://{tmp_path}/e")
    with zmq.Context.instance().socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(BadConfig, match="in use"), kv_event_sink(CacheArgs(kv_events=f"tcp://127.0.0.1:{port}")):
            pass
    with kv_event_sink(args):
        pass


def test_without_the_knob_there_is_nothing() -> None:
    with kv_event_sink(CacheArgs()) as sink:
        assert sink is None
        play = Script(kv_events=sink).run(generate("a", prompt_of(21)))
        assert play.scheduler.state.kv.cache.core.announce is False
        assert play.scheduler.control.metrics()["kv_events"] == {}


def test_kept_batches_are_bounded_by_number_and_by_bytes() -> None:
    kept = Kept(max_batches=3, max_bytes=10)
    for i in range(5):
        kept.add(i.to_bytes(8, "big"), b"..")
    assert [s[-1] for s, _ in kept.since(bytes(8))] == [2, 3, 4]
    kept.add((5).to_bytes(8, "big"), b"x" * 8)
    assert [s[-1] for s, _ in kept.since(bytes(8))] == [4, 5]
    assert kept.num_bytes == 10
    kept.add((300).to_bytes(8, "big"), b"")
    assert [int.from_bytes(s, "big") for s, _ in kept.since((256).to_bytes(8, "big"))] == [300]
