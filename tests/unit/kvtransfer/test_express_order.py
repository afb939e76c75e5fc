"""A session whose frames are announced beside the Peer stream: between the two ways there is no order but `after`."""

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.digests import wire_digest
from kvtransfer.transports.express import Express
from tests.unit.kvtransfer.byhand import HANDOFF, JOB, LAYER, Call, HandMade, HandMadeEnd, Receiver, running
from tests.unit.kvtransfer.support import make_end, settled

ZEROS = torch.zeros(LAYER, dtype=torch.uint8)
DIGESTS = [wire_digest(ZEROS)] * 3


class Fast(HandMade):
    """Its ends have an express, whose other half is the test's."""

    def open(self, *args) -> HandMadeEnd:
        theirs, self.ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for half in (theirs, self.ours):
            half.settimeout(5)
        end = super().open(*args)
        end.express = Express("by hand", theirs)
        return end


class Side:
    def __init__(self, receiver: Receiver, channels: Fast) -> None:
        self.receiver, self.table, self._channels = receiver, receiver.table, channels
        self.call: Call = receiver.call().offered()
        self.end = receiver.end

    def announce(self, layer: int, **change) -> None:
        frame = {"handoff": HANDOFF, "sequence": layer, "begin": 0, "end": 8, "nbytes": LAYER}
        frame |= {"layer_begin": layer, "layer_end": layer + 1}
        self.send(pb.PeerCommand(frame=pb.FrameAnnounce(**{**frame, **change})).SerializeToString())

    def frame(self, layer: int) -> None:
        self.announce(layer)
        self.end.arrive(ZEROS)

    def reply(self) -> pb.PeerReply:
        return pb.PeerReply.FromString(self._channels.ours.recv(100))

    def credit(self) -> int:
        """The last frame whose slot came back."""
        return self.reply().credit.sequence

    def hear(self) -> str | None:
        return self.reply().WhichOneof("reply")

    def send(self, packet: bytes) -> None:
        self._channels.ours.send(packet)

    def forgotten(self) -> bool:
        """Whether no frame of any handoff may come."""
        return not any(session._intake.inbound for session in self.receiver.peer.service._sessions)

    def leave(self) -> None:
        self._channels.ours.close()

    def commit(self, after: int, *, beside: bool = False) -> None:
        end = make_end(8)
        assert end.spec is not None
        spec, first = convert.spec_to_pb(end.spec), convert.tokens_to_pb(end.first)
        commit = pb.Commit(handoff=HANDOFF, spec=spec, first=first, digests=DIGESTS)
        if beside:
            self.send(pb.PeerCommand(commit=commit, after=after).SerializeToString())
        else:
            self.call.say(commit=commit, after=after)


@pytest.fixture
def side() -> Iterator[Side]:
    receiver = Receiver()
    channels = Fast()
    receiver.channels.open = channels.open  # type: ignore[method-assign,assignment]
    receiver.channels.ends = channels.ends
    with running(receiver):
        side = Side(receiver, channels)
        yield side
        side.leave()


def test_credits_come_back_the_same_way(side: Side) -> None:
    for layer in range(3):
        side.frame(layer)
        assert side.credit() == layer
    side.commit(after=3, beside=True)
    assert side.hear() == "commit_ack"


def test_a_commit_follows_its_frames_at_once(side: Side) -> None:
    for layer in range(2):
        side.frame(layer)
        side.credit()
    side.frame(2)
    side.commit(after=3, beside=True)
    assert [side.hear(), side.hear()] == ["credit", "commit_ack"]
    assert list(side.table.commits) == [JOB.handoff]


def test_of_two_commits_the_second_one_is_refused(side: Side) -> None:
    for layer in range(3):
        side.frame(layer)
        side.credit()
    for _ in range(2):
        side.commit(after=3, beside=True)
    assert side.hear() == "commit_ack"
    assert side.call.hear() == "STALE"
    assert list(side.table.commits) == [JOB.handoff]


def test_a_commit_that_an_abort_has_overtaken_is_refused(side: Side) -> None:
    for layer in range(3):
        side.frame(layer)
        side.credit()
    side.call.say(abort=pb.AbortHandoff(handoff=HANDOFF), after=3)
    side.table.wait_for(("aborted", JOB.handoff))
    side.commit(after=3, beside=True)
    assert side.call.hear() == "STALE"
    assert not side.table.commits


def test_a_commit_before_its_last_frame_ends_the_session(side: Side) -> None:
    side.frame(0)
    side.credit()
    side.commit(after=1, beside=True)
    assert [side.call.hear(), side.call.hear()] == ["FRAME", "ended"]


@pytest.mark.parametrize(
    "command",
    [pb.PeerCommand(), pb.PeerCommand(abort=pb.AbortHandoff(handoff=HANDOFF)), pb.PeerCommand(offer=pb.Offer())],
    ids="nothing abort offer".split(),
)
def test_what_belongs_on_the_stream_ends_the_session(side: Side, command: pb.PeerCommand) -> None:
    side.send(command.SerializeToString() or b"\x00")
    assert side.call.hear() in {"FRAME", "BROKEN"}
    assert side.call.hear() == "ended"


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_commit_waits_for_the_frames_that_it_comes_after(side: Side, before: int) -> None:
    for layer in range(before):
        side.frame(layer)
        side.credit()
    side.commit(after=3)
    for layer in range(before, 3):
        assert not side.table.commits
        side.frame(layer)
        side.credit()
    assert side.hear() == "commit_ack"
    assert list(side.table.commits) == [JOB.handoff]


def test_frames_that_an_abort_has_overtaken_are_taken_and_dropped(side: Side) -> None:
    side.call.say(abort=pb.AbortHandoff(handoff=HANDOFF), after=2)
    side.table.wait_for(("aborted", JOB.handoff))
    for layer in range(2):
        side.frame(layer)
        assert side.credit() == layer
    assert not side.receiver.kv.k.any()
    side.table.reserve(JOB.handoff, [11, 12])
    assert settled(side.forgotten)
    side.call.offer()
    assert side.call.hear() == "offer_accepted"


@pytest.mark.parametrize(
    "change",
    [
        {"handoff": pb.AbortHandoff(handoff=convert.handoff_to_pb(JOB.handoff)).handoff, "sequence": 1},
        {"handoff": convert.handoff_to_pb(type(JOB.handoff)("foreign", 1))},
        {"nbytes": LAYER + 1},
        {"layer_begin": 1, "layer_end": 3, "nbytes": 2 * LAYER},
    ],
    ids="order foreign size large".split(),
)
def test_a_frame_that_was_not_agreed_ends_the_session_and_is_not_expected(side: Side, change) -> None:
    side.announce(0, **change)
    assert [side.call.hear(), side.call.hear()] == ["FRAME", "ended"]
    assert side.end.expected == []


def test_more_frames_than_slots_are_never_expected(side: Side) -> None:
    """The third is refused, or not read before there is a slot for it."""
    for layer in range(3):
        side.announce(layer)
    assert settled(lambda: bool(side.end.waited) or side.end._closed)
    assert len(side.end.expected) <= 2


@pytest.mark.parametrize("packet", [b"\xff", b"\x0a\xff", bytes(40000)], ids="tag length large".split())
def test_a_packet_that_is_no_announcement_ends_the_session(side: Side, packet: bytes) -> None:
    side.send(packet)
    assert side.call.hear() in {"FRAME", "BROKEN"}
    assert side.call.hear() == "ended"


def test_a_sender_that_is_gone_ends_the_session(side: Side) -> None:
    side.leave()
    assert [side.call.hear(), side.call.hear()] == ["BROKEN", "ended"]


def test_the_end_of_the_stream_wakes_the_thread(side: Side) -> None:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kv-recv")]
    assert len(threads) == 1
    side.call.stream.close()
    assert settled(lambda: not threads[0].is_alive())


def test_a_frame_that_is_announced_the_other_way_ends_the_session(side: Side) -> None:
    side.frame(0)
    side.credit()
    side.call.frame(1)
    assert [side.call.hear(), side.call.hear()] == ["FRAME", "ended"]
