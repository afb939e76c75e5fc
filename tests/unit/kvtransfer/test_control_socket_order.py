"""Frames on the control socket, which only `after` orders with the Peer stream. `test_receiver.py` has common rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.rpc.v1 import peer_pb2 as pb
from tests.support.waiting import eventually
from tests.unit.kvtransfer.byhand import HANDOFF, JOB, Call, Receiver, announcement, commit_of, sessions


@pytest.fixture
def call() -> Iterator[Call]:
    with Receiver(control_socket=True) as receiver:
        yield receiver.call().offered()


def test_credits_and_the_acknowledgement_come_back_the_same_way(call: Call) -> None:
    call.arrived(range(2)).frame(2)
    call.receiver.end.arrive()
    call.commit()
    assert [call.hear(), call.hear()] == ["credit", "commit_ack"]
    assert list(call.receiver.table.commits) == [JOB.handoff]
    assert call.beside == [*["credit"] * 3, "commit_ack"]


def test_a_commit_that_an_abort_has_overtaken_is_refused(call: Call) -> None:
    call.arrived().abort(after=3)
    call.commit()
    assert call.hear() == "STALE"
    assert not call.receiver.table.commits


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_commit_waits_for_the_frames_that_it_comes_after(call: Call, before: int) -> None:
    call.arrived(range(before)).say(commit=commit_of(), after=3)
    for layer in range(before, 3):
        assert not call.receiver.table.commits
        call.arrived([layer])
    assert call.hear() == "commit_ack"
    assert list(call.receiver.table.commits) == [JOB.handoff]


def test_frames_that_an_abort_has_overtaken_are_taken_and_dropped(call: Call) -> None:
    receiver = call.receiver
    call.abort(after=2)
    call.arrived(range(2))
    assert not receiver.kv.k.any()
    receiver.table.reserve(JOB.handoff, [11, 12])
    eventually(lambda: not any(session._receive_loop.inbound for session in receiver.peer.service._sessions))
    call.offer()
    assert call.hear() == "offer_accepted"


def test_more_frames_than_slots_are_never_expected(call: Call) -> None:
    """A frame beyond the slots is rejected, or not read until a slot is free."""
    for layer in range(3):
        call.frame(layer)
    end = call.receiver.end
    eventually(lambda: end.waited or end.closed)
    assert len(end.expected) <= 2


@pytest.mark.parametrize(
    "packet",
    [
        b"\x00",
        pb.PeerCommand(abort=pb.AbortHandoff(handoff=HANDOFF)).SerializeToString(),
        pb.PeerCommand(offer=pb.Offer()).SerializeToString(),
        b"\xff",
        b"\x0a\xff",
        bytes(40000),
    ],
    ids="nothing abort offer tag length large".split(),
)
def test_a_packet_that_is_neither_announcement_nor_commit_ends_the_session(call: Call, packet: bytes) -> None:
    call.send(packet)
    assert call.hear() in {"FRAME", "BROKEN"}
    assert call.hear() == "ended"


def test_a_sender_that_is_gone_ends_the_session(call: Call) -> None:
    call.receiver.end.leave()
    call.refused("BROKEN")


def test_the_end_of_the_stream_wakes_the_thread(call: Call) -> None:
    assert len(sessions()) == 1
    call.stream.close()
    eventually(lambda: not sessions())


def test_a_frame_that_is_announced_the_other_way_ends_the_session(call: Call) -> None:
    call.arrived([0]).say(frame=announcement(1))
    call.refused("FRAME")
