"""The receiver against senders that break the protocol: refused by name, and no receive is posted for it."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from baton.core import PROTOCOL_VERSION, KVLayout
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.memory import MemoryTransport
from kvtransfer.receiver import PeerService
from kvtransfer.transport import ChannelName, KeyRelay, Side
from tests.unit.kvtransfer.support import (
    FINGERPRINT,
    LAYOUT,
    SETTINGS,
    D,
    LoopbackPeer,
    P,
    RecordingTable,
    Wrapped,
    make_job,
    make_kv,
    settled,
)

JOB = make_job("r", 8, [1, 2])
HANDOFF = convert.handoff_to_pb(JOB.handoff)
SMALL = replace(SETTINGS, frame_size=2 * LAYOUT.layer_block_bytes, credits=2)


class Receives:
    """Counts posted receives; none of them ever ends well."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.posted: list[int] = []

    def recv(self, out) -> None:
        self.posted.append(len(out))
        self._inner.recv(out)

    def close(self) -> None:
        self._inner.close()


class Stranger:
    """A sender's stream by hand."""

    def __init__(self) -> None:
        self.table = RecordingTable()
        self.table.reserve(JOB.handoff, [11, 12])
        self.ends: list[Receives] = []
        self.memory = MemoryTransport()
        transport = Wrapped(self.memory, self._count)
        self.peer = LoopbackPeer(
            lambda: PeerService(make_kv(None), D, FINGERPRINT, SMALL, self.table, transport=transport)
        )
        self.streams: list = []
        self.replies: queue.Queue[pb.PeerReply | str] = queue.Queue()
        self.stream = self.open()

    def _count(self, end) -> Receives:
        self.ends.append(Receives(end))
        return self.ends[-1]

    def open(self):
        self.streams.append(self.peer.connect("", self.replies.put, self.replies.put))
        return self.streams[-1]

    def say(self, **command) -> None:
        self.stream.send(pb.PeerCommand(**command))

    def hear(self) -> str:
        """The kind of the next reply; of a refusal, its reason; "ended" at the end."""
        reply = self.replies.get(timeout=5)
        if isinstance(reply, str):
            return reply
        if reply.HasField("refused"):
            return pb.HandoffRefusal.Name(reply.refused.reason).removeprefix("HANDOFF_REFUSAL_")
        return str(reply.WhichOneof("reply"))

    def hello(self, **change) -> None:
        hello = pb.PeerHello(
            protocol_version=PROTOCOL_VERSION,
            sender=convert.ref_to_pb(P),
            receiver=convert.ref_to_pb(D),
            transport="memory",
            generation=3,
            fingerprint=FINGERPRINT,
            layout=convert.layout_to_pb(LAYOUT),
        )
        hello.MergeFrom(pb.PeerHello(**change))
        self.say(hello=hello)

    def offer(self, **change) -> None:
        offer = pb.Offer(handoff=HANDOFF, fingerprint=FINGERPRINT, known_tokens=8, frames=3)
        offer.MergeFrom(pb.Offer(**change))
        self.say(offer=offer)

    def frame(self, **change) -> None:
        size = 2 * LAYOUT.layer_block_bytes
        frame = pb.FrameAnnounce(handoff=HANDOFF, layer_end=1, block_end=2, nbytes=size)
        frame.MergeFrom(pb.FrameAnnounce(**change))
        self.say(frame=frame)

    def welcomed(self) -> None:
        self.hello()
        assert self.hear() == "welcome"

    def offered(self) -> None:
        self.welcomed()
        self.offer()
        assert self.hear() == "offer_accepted"

    def close(self) -> None:
        self.peer.run(self.peer.service.close())  # first: a posted receive would hold the others up
        for stream in self.streams:
            stream.close()
        self.peer.close()


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    stranger = Stranger()
    yield stranger
    for end in stranger.ends:
        end.close()
    stranger.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, "VERSION"),
        ({"transport": "gloo"}, "VERSION"),
        ({"fingerprint": "other"}, "FINGERPRINT"),
        ({"layout": convert.layout_to_pb(KVLayout(1, 1, 1, 1, "float32", ()))}, "FINGERPRINT"),
        ({"receiver": {"incarnation": {"epoch": 8}}}, "STALE"),
        ({"receiver": {"worker_id": "decode-1"}}, "STALE"),
    ],
)
def test_hello_of_another_kind_is_refused(stranger: Stranger, change, reason: str) -> None:
    stranger.hello(**change)
    assert [stranger.hear(), stranger.hear()] == [reason, "ended"]
    assert not stranger.table.events


def test_a_stream_begins_with_hello(stranger: Stranger) -> None:
    stranger.offer()
    assert stranger.hear() == "VERSION"  # there is none in an empty hello
    assert stranger.hear() == "ended"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "other"}, "FINGERPRINT"),
        ({"frames": 4}, "LENGTH"),
        ({"known_tokens": 9}, "LENGTH"),
        ({"skip": 4}, "LENGTH"),
        ({"handoff": {"request_id": "other"}}, "STALE"),
        ({"handoff": {"attempt": 2}}, "STALE"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused_and_the_channel_lives(stranger: Stranger, change, reason: str) -> None:
    stranger.welcomed()
    stranger.offer(**change)
    assert stranger.hear() == reason
    stranger.offer()
    assert stranger.hear() == "offer_accepted"
    stranger.offer()
    assert stranger.hear() == "STALE"


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 1 << 30},
        {"nbytes": 2 * LAYOUT.layer_block_bytes + 1},
        {"index": 1},
        {"sequence": 1},
        {"layer_begin": 1, "layer_end": 2},
        {"block_end": 3},
        {"handoff": {"request_id": "other"}},
    ],
)
def test_a_frame_that_was_not_planned_closes_the_channel_before_a_receive(stranger: Stranger, change) -> None:
    stranger.offered()
    stranger.frame(**change)
    assert [stranger.hear(), stranger.hear()] == ["FRAME", "ended"]
    assert not any(end.posted for end in stranger.ends)
    assert stranger.table.events[-1] == ("lost", P)


def test_more_frames_than_credits_close_the_channel(stranger: Stranger) -> None:
    stranger.offered()
    for index in range(3):
        stranger.frame(index=index, sequence=index, layer_begin=index, layer_end=index + 1)
    assert [stranger.hear(), stranger.hear()] == ["FRAME", "ended"]


@pytest.mark.parametrize("frames", [0, 2])
def test_a_commit_before_its_last_frame_closes_the_channel(stranger: Stranger, frames: int) -> None:
    stranger.offered()
    for index in range(frames):
        stranger.frame(index=index, sequence=index, layer_begin=index, layer_end=index + 1)
    stranger.say(commit=pb.Commit(handoff=HANDOFF, spec=convert.spec_to_pb(JOB.spec)))
    assert [stranger.hear(), stranger.hear()] == ["FRAME", "ended"]
    assert not stranger.table.commits


def test_a_commit_of_what_was_not_offered_is_stale(stranger: Stranger) -> None:
    stranger.welcomed()
    stranger.say(commit=pb.Commit(handoff=HANDOFF, spec=convert.spec_to_pb(JOB.spec)))
    assert stranger.hear() == "STALE"


def test_a_newer_generation_takes_over_and_an_older_one_is_refused(stranger: Stranger) -> None:
    stranger.offered()
    stranger.stream = stranger.open()
    stranger.hello(generation=4)
    heard = [stranger.hear() for _ in range(3)]
    assert sorted(heard) == ["BROKEN", "ended", "welcome"]
    assert stranger.table.events == [("offer", JOB.handoff), ("lost", P)]
    stranger.stream = stranger.open()
    stranger.hello(generation=4)
    assert [stranger.hear(), stranger.hear()] == ["STALE", "ended"]
    assert stranger.table.events == [("offer", JOB.handoff), ("lost", P)]


def test_malformed_messages_end_the_stream(stranger: Stranger) -> None:
    stranger.welcomed()
    stranger.say(abort=pb.AbortHandoff())
    assert [stranger.hear(), stranger.hear()] == ["FRAME", "ended"]
    assert stranger.table.events == [("lost", P)]


def test_an_offer_of_more_than_the_cache_holds_is_refused_before_it_is_planned(stranger: Stranger) -> None:
    stranger.welcomed()
    stranger.offer(known_tokens=2**32 - 1)  # its plan alone would fill the memory
    assert stranger.hear() == "LENGTH"


def test_a_generation_is_over_for_good_when_its_channel_has_ended(stranger: Stranger) -> None:
    stranger.welcomed()
    stranger.say(abort=pb.AbortHandoff())
    assert [stranger.hear(), stranger.hear()] == ["FRAME", "ended"]
    for generation, heard in ((2, ["STALE", "ended"]), (3, ["STALE", "ended"]), (4, ["welcome"])):
        stranger.stream = stranger.open()
        stranger.hello(generation=generation)
        assert [stranger.hear() for _ in heard] == heard


def test_no_receive_is_posted_after_the_end(stranger: Stranger) -> None:
    stranger.offered()
    for index in range(2):
        stranger.frame(index=index, sequence=index, layer_begin=index, layer_end=index + 1)
    assert settled(lambda: [len(end.posted) for end in stranger.ends] == [1])
    stranger.say(abort=pb.AbortHandoff())
    assert [stranger.hear(), stranger.hear()] == ["FRAME", "ended"]
    other = stranger.memory.open(ChannelName(P.incarnation, D.incarnation, 3), Side.SENDER, KeyRelay(print), 5.0)
    other.send(torch.zeros(stranger.ends[0].posted[0], dtype=torch.uint8))
    assert settled(lambda: not [t for t in threading.enumerate() if t.name.startswith("kv-recv")])
    assert len(stranger.ends[0].posted) == 1
