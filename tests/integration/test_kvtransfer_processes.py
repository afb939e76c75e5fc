"""Handoffs between processes over gloo, shared memory, CUDA IPC or NIXL: bytes, killed processes, no resource left.

`tests/unit/kvtransfer` tests rejections, and the end of a push in each state, within one process.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core import Incarnation, KVLayout, WorkerRef
from baton.engine.kernels.gpu.cuda_memory import ExposedGpuMemory
from baton.errors import ChannelBroken
from kvtransfer.handoff import PushResult, TransferSettings
from kvtransfer.sender import GrpcPeerStream
from tests.integration.kvtransfer_peer import Prefill, Process, Receiver, kv_digest, kv_for, receiving
from tests.support.time_factor import scaled
from tests.support.waiting import eventually, until
from tests.unit.kvtransfer.support import LAYOUT, P, RecordingTable, make_job

WIDE = KVLayout(layers=4, kv_heads=8, head_dim=64, block_size=16, dtype="float32")  # 256 KiB a block
NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed (the extra nixl)")
FOREVER_S = 600.0  # longer than a test: only the death itself ends the push


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts processes. All are killed at the end."""
    torch.set_num_threads(1)
    started: list[Process] = []

    def one(kind: type[Process], *args, **options) -> Process:
        started.append(kind(*args, **options))
        return started[-1]

    yield one
    for process in started:
        process.kill()


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch built for CUDA")


@pytest.fixture(params=["gloo", "shm", pytest.param("cuda_ipc", marks=NO_GPU), pytest.param("nixl", marks=NEEDS_NIXL)])
def over(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def receiver(start: Callable[..., Any], over: str) -> Receiver:
    return start(Receiver, over=over)


@pytest.fixture
def prefills(over: str) -> Iterator[Callable[..., Prefill]]:
    """Makes senders. At the end all are closed and all their threads have ended."""
    before, made = set(threading.enumerate()), list[Prefill]()

    def make(layout: KVLayout = LAYOUT, **kwargs: Any) -> Prefill:
        made.append(Prefill(layout, over=over, **kwargs))
        return made[-1]

    yield make
    for prefill in made:
        prefill.sender.close()
    eventually(lambda: set(threading.enumerate()) <= before)


def test_kv_arrives_equal_also_in_blocks_of_another_size(start, over, prefills) -> None:
    """The receiver gets only the missing part of each prompt, computed whole or in chunks of 48."""
    prefill = prefills()
    receiver = start(Receiver, over=over, frame_size=1500, layout=replace(LAYOUT, block_size=16))
    cases = {"one": (1, 0), "edge-1": (15, 0), "edge": (16, 3), "edge+1": (17, 16), "long": (130, 30)}
    target = {"one": [0], "edge-1": [1], "edge": [2], "edge+1": [4, 3], "long": list(range(13, 4, -1))}
    source = {name: [(7 * n + end) % 64 for n in range(LAYOUT.blocks_for(end))] for name, (end, _) in cases.items()}
    receiver.ask(reserve=target)
    for n, (name, (tokens, skip)) in enumerate(cases.items()):
        handoff = prefill.push(name, tokens, source[name], receiver.ref, chunk=n % 2 * 48, skip=skip)
        nbytes = (tokens - skip) * LAYOUT.layers * LAYOUT.layer_token_bytes
        assert prefill.reports.done(handoff).nbytes == nbytes
    arrived = {name: [target[name], *span] for name, span in cases.items()}
    before = {"before": [target["long"], 30], "zeros": [[20, 21], 30]}
    answer = receiver.ask(digest={**arrived, **before})
    assert answer["commits"] == list(cases)
    digests = answer["digests"]
    assert digests.pop("before") == digests.pop("zeros")
    assert digests == {name: kv_digest(prefill.kv, source[name], *span) for name, span in cases.items()}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "not an address"])
def test_an_address_without_a_listener(prefills, address: str) -> None:
    prefill, absent = prefills(), WorkerRef("decode-0", Incarnation(7, 2), address)
    prefill.reports.failed(prefill.push("r", 4, [1], absent), ChannelBroken, address)


def test_a_reply_that_no_stream_takes_ends_the_channel(receiver: Receiver, prefills) -> None:
    def bad(reply) -> None:
        raise RuntimeError("a bug")

    def connect(address, on_reply, on_end):
        return GrpcPeerStream(address, bad, on_end)

    prefill = prefills(connect=connect)
    handoff = prefill.push("r", 4, [1], receiver.ref)
    prefill.reports.failed(handoff, ChannelBroken, "RuntimeError", timeout=scaled(4))


def test_a_receiver_killed_mid_push_and_its_successor(start, over, prefills) -> None:
    wide = prefills(WIDE, deadline_s=FOREVER_S)
    receiver = start(Receiver, over=over, frame_size=WIDE.block_size * WIDE.layer_token_bytes, layout=WIDE)
    receiver.ask(reserve={f"r{n}": list(range(60)) for n in range(20)})
    handoffs = [wide.push(f"r{n}", 60 * 16, range(60), receiver.ref, chunk=256) for n in range(20)]
    wide.reports.done(handoffs[0])  # the others are running
    receiver.kill()
    outcomes = [wide.reports.wait(handoff, 30) for handoff in handoffs]
    assert isinstance(outcomes[-1], ChannelBroken)
    assert all(isinstance(outcome, PushResult | ChannelBroken) for outcome in outcomes)
    successor = start(Receiver, over=over, counter=3, layout=WIDE)
    successor.ask(reserve={"again": [5, 6]})
    wide.reports.done(wide.push("again", 32, [8, 9], successor.ref))
    assert successor.ask(digest={"again": [[5, 6], 32]})["digests"]["again"] == kv_digest(wide.kv, [8, 9], 32)


def test_a_frozen_receiver_is_given_up_by_the_deadline(receiver: Receiver, prefills) -> None:
    prefill = prefills(deadline_s=scaled(2.0))
    receiver.ask(reserve={"r": [1], "s": [2], "t": [3]})
    prefill.reports.done(prefill.push("r", 4, [1], receiver.ref))
    receiver.send_signal(signal.SIGSTOP)
    prefill.reports.failed(prefill.push("s", 4, [1], receiver.ref), ChannelBroken, timeout=scaled(8))
    receiver.send_signal(signal.SIGCONT)
    prefill.reports.done(prefill.push("t", 4, [1], receiver.ref))  # the channel recovers
    assert receiver.ask()["commits"] == ["r", "t"]


@pytest.mark.chaos  # NIXL has limits of time of its own, which a loaded machine meets
@pytest.mark.parametrize("over", [pytest.param("nixl", marks=NEEDS_NIXL)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_serves_staging_dies_or_freezes(receiver: Receiver, prefills, number: int) -> None:
    """The worker stays, and so do the blocks of the next push. The next channel replaces a process that has ended, and
    ends a frozen one.
    """
    prefill = prefills()
    (transport,) = prefill.sender._end.choice.transports
    receiver.ask(reserve={"r": [1], "s": [2], "q": [4], "t": [3]})
    prefill.reports.done(prefill.push("r", 4, [1], receiver.ref))
    os.kill(transport._served[1]._process.pid, number)
    prefill.reports.failed(prefill.push("s", 4, [1], receiver.ref), ChannelBroken, timeout=scaled(8))
    if number == signal.SIGSTOP:
        prefill.reports.failed(prefill.push("q", 4, [1], receiver.ref), ChannelBroken, timeout=scaled(8))
        eventually(lambda: transport._served[1].ended)
    prefill.reports.done(prefill.push("t", 4, [1], receiver.ref))
    answer = receiver.ask(digest={"t": [[3], 4], "s": [[2], 4], "zeros": [[9], 4]})
    assert answer["commits"] == ["r", "t"]
    assert answer["digests"]["t"] == kv_digest(prefill.kv, [1], 4)
    assert answer["digests"]["s"] == answer["digests"]["zeros"]


async def test_a_sender_killed_mid_push(start, over) -> None:
    table, before = RecordingTable(WIDE), set(threading.enumerate())
    settings = TransferSettings(over, WIDE.block_size * WIDE.layer_token_bytes)
    async with receiving(kv_for(over, None, WIDE), table, settings) as me:
        sender = start(Process, "sender", over=over, to=me.address, layout=WIDE)
        writing, blocks = threading.Event(), list(range(60))
        table.hold = writing.set
        table.reserve(make_job("r", 60 * 16).handoff, blocks)
        sender.tell(push="r", tokens=60 * 16, blocks=blocks)
        await until(writing.is_set, "the first frame", within_s=30)
        sender.kill()
        await asyncio.to_thread(table.wait_for, ("lost", P))
        assert not table.commits
    eventually(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("kv-")])


def test_close_leaves_no_descriptor_and_the_peer_ends_clean(receiver: Receiver, prefills) -> None:
    senders: list[Prefill] = []

    def descriptors() -> int:
        for sender in senders:
            if isinstance(memory := sender.kv.exposed, ExposedGpuMemory):
                memory.lend(lambda: True)  # the next loan closes the sockets of readers that are gone
        return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())

    receiver.ask(reserve={f"r{n}": [n] for n in range(3)})
    counts = []
    for n in range(3):
        prefill = prefills(me=replace(P, incarnation=Incarnation(8, n)))
        prefill.reports.done(prefill.push(f"r{n}", 4, [1], receiver.ref))
        prefill.sender.close()
        senders.append(prefill)
        counts.append(descriptors())
    eventually(lambda: descriptors() <= counts[0])
    eventually(lambda: receiver.ask()["threads"] == 0)
    assert len(receiver.ask()["lost"]) == 3
    assert receiver.stop() == 0
