"""Both kinds of channel obey one contract: in order, all there is, no waiting without need, nothing lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rootlet.ipc.channel_inproc import InprocAsyncChannel, InprocChannel
from rootlet.ipc.channel_zmq import ZmqAsyncReceiver, ZmqReceiver, ZmqSender, address
from rootlet.ipc.codec import main_codec, scheduler_codec
from rootlet.ipc.messages import AbortReq, HealthTick

WAIT_S = 60.0  # so that nothing hangs
Pair = tuple[Any, Any]


@pytest.fixture(params=["inproc", "zmq"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    if request.param == "inproc":
        channel: InprocChannel[Any] = InprocChannel()
        yield channel, channel
        return
    where = address(tmp_path, "s")
    sender, receiver = ZmqSender(where, scheduler_codec(), linger_s=0.0), ZmqReceiver(where, scheduler_codec())
    yield sender, receiver
    sender.close()
    receiver.close()


def _take(recv: Callable[[float], list[Any]], count: int, *, wakes: int = 0) -> list[Any]:
    """`wakes`: how often the receiver may be woken by what it cannot decode, before the next message is there."""
    got: list[Any] = []
    while len(got) < count:
        batch = recv(WAIT_S)
        assert batch or wakes, f"only {len(got)} of {count} arrived"
        wakes -= not batch
        got += batch
    return got


def test_messages_arrive_in_order(pair: Pair) -> None:
    sender, receiver = pair
    sent = [AbortReq(f"r{k}") for k in range(2000)]
    for message in sent:
        sender.send(message)
    assert _take(receiver.recv, 2000) == sent


def test_an_empty_channel_answers_at_once(pair: Pair) -> None:
    assert pair[1].recv(0.0) == []


def test_a_waiting_receiver_is_woken(pair: Pair) -> None:
    sender, receiver = pair
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(_take(receiver.recv, 1)))
    thread.start()
    sender.send(AbortReq("r"))
    thread.join(WAIT_S)
    assert got == [AbortReq("r")]


def test_garbage_between_messages_is_skipped(tmp_path: Path) -> None:
    where = address(tmp_path, "s")
    sender, receiver = ZmqSender(where, scheduler_codec(), linger_s=0.0), ZmqReceiver(where, scheduler_codec())
    sender._socket.send(b"\xc1garbage")
    sender.send(AbortReq("r"))
    assert _take(receiver.recv, 1, wakes=1) == [AbortReq("r")]
    sender.close()
    receiver.close()


def test_sending_to_nobody_never_blocks(tmp_path: Path) -> None:
    sender = ZmqSender(address(tmp_path, "nobody"), scheduler_codec(), linger_s=0.0)
    for k in range(5000):
        sender.send(AbortReq(f"r{k}"))
    sender.close()


def test_asyncio_receivers_take_all_and_survive_a_cancel(tmp_path: Path) -> None:
    async def scenario(kind: str) -> list[Any]:
        if kind == "inproc":
            channel: InprocAsyncChannel[Any] = InprocAsyncChannel(asyncio.get_running_loop())
            sender, receiver = channel, channel
        else:
            where = address(tmp_path, "m")
            receiver = ZmqAsyncReceiver(where, main_codec())  # type: ignore[assignment]
            sender = ZmqSender(where, main_codec(), linger_s=0.0)  # type: ignore[assignment]
        waiting = asyncio.ensure_future(receiver.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.to_thread(lambda: [sender.send(HealthTick(k)) for k in range(100)] if kind == "inproc" else None)
        if kind == "zmq":
            for k in range(100):
                sender.send(HealthTick(k))
        got: list[Any] = []
        while len(got) < 100:
            got += await asyncio.wait_for(receiver.recv(), WAIT_S)
        sender.close()
        receiver.close()
        return [tick.steps for tick in got]

    for kind in ("inproc", "zmq"):
        assert asyncio.run(scenario(kind)) == list(range(100))
