"""Handoffs between two processes over gloo and gRPC: bytes, concurrency, deaths."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core import Incarnation, KVLayout, WorkerRef
from baton.errors import ChannelBroken, DigestMismatch, StaleAttempt
from baton.rpc.channel import aio_server, bind
from baton.rpc.v1.peer_pb2_grpc import add_PeerServicer_to_server
from kvtransfer.handoff import PushResult, TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.stream import GrpcPeerStream
from kvtransfer.transports.gloo import GlooTransport
from tests.integration.kvtransfer_peer import kv_digest
from tests.integration.kvtransfer_processes import Prefill, Process, Receiver
from tests.unit.kvtransfer.support import (
    FINGERPRINT,
    LAYOUT,
    D,
    P,
    RecordingTable,
    Reports,
    hand_over,
    make_job,
    make_kv,
    settled,
)

WIDE = KVLayout(layers=4, kv_heads=8, head_dim=64, block_size=16, dtype="float32")  # 256 KiB a block


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Those in it are killed at the end."""
    torch.set_num_threads(1)
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    before = set(threading.enumerate())
    prefill = Prefill()
    yield prefill
    prefill.sender.close()
    assert settled(lambda: set(threading.enumerate()) <= before), set(threading.enumerate()) - before


@pytest.mark.parametrize("frame_size", [1, 1500, 1 << 20])
@pytest.mark.parametrize("chunk", [0, 48])
def test_kv_bytes_arrive_equal(processes, prefill: Prefill, frame_size: int, chunk: int) -> None:
    receiver = Receiver("--frame-size", str(frame_size), "--verify-kv")
    processes.append(receiver)
    cases = {"one": 1, "edge-1": 3, "edge": 4, "edge+1": 5, "long": 130}
    source = {name: [(7 * i + tokens) % 64 for i in range(LAYOUT.blocks_for(tokens))] for name, tokens in cases.items()}
    target = {"one": [0], "edge-1": [1], "edge": [2], "edge+1": [4, 3], "long": list(range(5, 38))}
    receiver.ask(reserve=target)
    handoffs = [prefill.push(name, tokens, source[name], receiver.ref, chunk=chunk) for name, tokens in cases.items()]
    for handoff in handoffs:
        prefill.reports.done(handoff)
    answer = receiver.ask(digest={name: [target[name], tokens] for name, tokens in cases.items()})
    assert sorted(answer["commits"]) == sorted(cases)
    assert answer["digests"] == {name: kv_digest(prefill.kv, source[name], tokens) for name, tokens in cases.items()}


def test_only_what_the_receiver_lacks_is_sent_also_into_blocks_of_another_size(processes, prefill: Prefill) -> None:
    receiver = Receiver("--verify-kv", layout=replace(LAYOUT, block_size=16))
    processes.append(receiver)
    receiver.ask(reserve={"r": [5, 9, 2]})
    result = prefill.reports.done(prefill.push("r", 41, range(11), receiver.ref, chunk=10, skip=30))
    assert result.nbytes == 11 * LAYOUT.layers * LAYOUT.layer_token_bytes
    answer = receiver.ask(digest={"r": [[5, 9, 2], 41, 30], "before": [[5, 9, 2], 30], "zeros": [[0, 1, 3], 30]})
    assert answer["digests"]["r"] == kv_digest(prefill.kv, range(11), 41, 30)
    assert answer["digests"]["before"] == answer["digests"]["zeros"]


def test_two_prefill_workers_share_staging_for_one_channel(processes) -> None:
    """Each new channel takes the place of the other one's, which is idle by then."""
    receiver = Receiver("--staging-memory", str(4 << 16))
    processes.append(receiver)
    pair = [Prefill(me=replace(P, incarnation=Incarnation(8, n))) for n in range(2)]
    receiver.ask(reserve={f"r{n}": [n] for n in range(4)})
    try:
        for n in range(4):
            assert settled(lambda: receiver.ask()["threads"] <= 1)
            pair[n % 2].reports.done(pair[n % 2].push(f"r{n}", 4, [n], receiver.ref))
            assert settled(lambda: not [link for link in pair[1 - n % 2].sender._links if link.running])  # noqa: B023
        assert receiver.ask()["commits"] == [f"r{n}" for n in range(4)]
    finally:
        for prefill in pair:
            prefill.sender.close()


def test_fifty_concurrent_handoffs(processes, prefill: Prefill) -> None:
    receivers = [Receiver(counter=counter) for counter in (2, 3)]
    processes.extend(receivers)
    names = [f"r{n}" for n in range(50)]
    for receiver in receivers:
        receiver.ask(reserve={name: [n] for n, name in enumerate(names)})
    start = threading.Barrier(5)

    def push(part: int) -> None:
        start.wait()
        for n in range(part, 50, 5):
            prefill.push(names[n], 1 + n % 4, [63 - n], receivers[n % 2].ref, chunk=n % 3)

    threads = [threading.Thread(target=push, args=(part,)) for part in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        handoff = make_job(name, 1).handoff
        assert isinstance(prefill.reports.wait(handoff), PushResult)
    for side, receiver in enumerate(receivers):
        mine = range(side, 50, 2)
        answer = receiver.ask(digest={names[n]: [[n], 1 + n % 4] for n in mine})
        assert sorted(answer["commits"]) == sorted(names[n] for n in mine)
        assert answer["digests"] == {names[n]: kv_digest(prefill.kv, [63 - n], 1 + n % 4) for n in mine}
        assert answer["threads"] == 1


def test_a_flipped_byte_is_found(processes, prefill: Prefill) -> None:
    receiver = Receiver("--flip", "1", "--frame-size", "512")
    processes.append(receiver)
    receiver.ask(reserve={"bad": [1], "good": [2]})
    assert isinstance(prefill.reports.wait(prefill.push("bad", 4, [1], receiver.ref)), DigestMismatch)
    assert isinstance(prefill.reports.wait(prefill.push("good", 4, [1], receiver.ref)), PushResult)
    assert receiver.ask()["commits"] == ["good"]


def test_another_incarnation_and_an_unknown_attempt_are_refused(processes, prefill: Prefill) -> None:
    receiver = Receiver()
    processes.append(receiver)
    receiver.ask(reserve={"r": [1]})
    ghost = WorkerRef(D.worker_id, Incarnation(7, 99), receiver.ref.address)
    assert isinstance(prefill.reports.wait(prefill.push("r", 4, [1], ghost)), StaleAttempt)
    assert isinstance(prefill.reports.wait(prefill.push("other", 4, [1], receiver.ref)), StaleAttempt)
    assert receiver.ask()["commits"] == []


def test_nobody_at_the_address(prefill: Prefill) -> None:
    nobody = WorkerRef("decode-0", Incarnation(7, 2), "127.0.0.1:1")
    outcome = prefill.reports.wait(prefill.push("r", 4, [1], nobody))
    assert isinstance(outcome, ChannelBroken)
    assert "127.0.0.1:1" in str(outcome)


def test_a_reply_that_nobody_can_take_ends_the_channel(processes) -> None:
    def bad(reply) -> None:
        raise RuntimeError("a bug")

    def connect(address, on_reply, on_end):
        return GrpcPeerStream(address, bad, on_end)

    receiver, reports = Receiver(), Reports()
    processes.append(receiver)
    transports = [GlooTransport("127.0.0.1")]
    sender = Sender(make_kv(1), P, FINGERPRINT, TransferSettings(), transports, reports, connect=connect)
    try:
        handoff = hand_over(sender, make_job("r", 4, receiver.ref), [1])
        assert "RuntimeError" in str(reports.wait(handoff, 4))
    finally:
        sender.close()


def test_a_receiver_killed_mid_push_and_its_successor(processes) -> None:
    wide = Prefill(WIDE, deadline_s=600.0)  # longer than this test may take: the death itself is seen
    try:
        receiver = Receiver("--frame-size", str(WIDE.layer_block_bytes), layout=WIDE)
        processes.append(receiver)
        receiver.ask(reserve={f"r{n}": list(range(60)) for n in range(20)})
        handoffs = [wide.push(f"r{n}", 60 * 16, range(60), receiver.ref, chunk=256) for n in range(20)]
        assert isinstance(wide.reports.wait(handoffs[0]), PushResult)  # the others are under way
        receiver.kill()
        outcomes = [wide.reports.wait(handoff, 30) for handoff in handoffs]
        assert isinstance(outcomes[-1], ChannelBroken)
        assert all(isinstance(outcome, PushResult | ChannelBroken) for outcome in outcomes)
        successor = Receiver("--frame-size", "65536", counter=3, layout=WIDE)
        processes.append(successor)
        successor.ask(reserve={"again": [5, 6]})
        wide.reports.done(wide.push("again", 32, [8, 9], successor.ref))
        assert successor.ask(digest={"again": [[5, 6], 32]})["digests"]["again"] == kv_digest(wide.kv, [8, 9], 32)
    finally:
        wide.sender.close()


def test_a_frozen_receiver_is_given_up_by_the_deadline(processes) -> None:
    prefill = Prefill(deadline_s=1.0)
    receiver = Receiver()
    processes.append(receiver)
    receiver.ask(reserve={"r": [1], "s": [2], "t": [3]})
    try:
        assert isinstance(prefill.reports.wait(prefill.push("r", 4, [1], receiver.ref)), PushResult)
        os.kill(receiver.process.pid, signal.SIGSTOP)
        outcome = prefill.reports.wait(prefill.push("s", 4, [1], receiver.ref), 4)
        assert isinstance(outcome, ChannelBroken)
        os.kill(receiver.process.pid, signal.SIGCONT)
        assert isinstance(prefill.reports.wait(prefill.push("t", 4, [1], receiver.ref)), PushResult)  # a way back
        assert receiver.ask()["commits"] == ["r", "t"]
    finally:
        prefill.sender.close()


async def test_a_sender_killed_mid_push(processes) -> None:
    table, before = RecordingTable(WIDE), set(threading.enumerate())
    frame_size = WIDE.layer_block_bytes
    server = aio_server()
    me = WorkerRef("decode-0", Incarnation(7, 2), bind(server, "127.0.0.1:0"))
    settings = TransferSettings("gloo", frame_size)
    transports = [GlooTransport(settings.bind_host)]
    service = PeerService(make_kv(None, 64, WIDE), me, FINGERPRINT, settings, table, transports)
    add_PeerServicer_to_server(service, server)
    await server.start()
    sender = Process("sender", "--to", me.address, layout=WIDE)
    processes.append(sender)
    writing, blocks = threading.Event(), list(range(60))
    table.hold = writing.set
    job = make_job("r", 60 * 16)
    table.reserve(job.handoff, blocks)
    sender.tell(push="r", tokens=60 * 16, blocks=blocks)
    assert await asyncio.to_thread(writing.wait, 20)
    sender.kill()
    await asyncio.to_thread(table.wait_for, ("lost", WorkerRef("prefill-0", P.incarnation, "none")), 3)
    assert not table.commits
    await server.stop(0)
    await service.close()
    assert settled(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("kv-")])


def test_close_leaves_no_descriptor_and_the_peer_ends_clean(processes) -> None:
    def descriptors() -> int:
        return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())

    receiver = Receiver()
    processes.append(receiver)
    receiver.ask(reserve={f"r{n}": [n] for n in range(3)})
    counts = []
    for n in range(3):
        prefill = Prefill(me=replace(P, incarnation=Incarnation(8, n)))
        assert isinstance(prefill.reports.wait(prefill.push(f"r{n}", 4, [1], receiver.ref)), PushResult)
        prefill.sender.close()
        counts.append(descriptors())
    assert settled(lambda: descriptors() <= counts[0]), counts
    assert settled(lambda: receiver.ask()["threads"] == 0)
    assert len(receiver.ask()["lost"]) == 3
    assert receiver.stop() == 0
