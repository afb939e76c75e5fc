"""The receiver against senders that break the protocol: refused by name, and no receive is posted for it."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from baton.core import PROTOCOL_VERSION, Incarnation, KVLayout
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import probe
from kvtransfer.digests import wire_digest
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.byhand import HANDOFF, JOB, LAYER, SMALL, Call, Receiver, running, sessions
from tests.unit.kvtransfer.support import LAYOUT, D, P, make_kv, settled


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running(Receiver()) as receiver:
        yield receiver


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, "VERSION"),
        ({"protocol_version": PROTOCOL_VERSION - 1}, "VERSION"),
        ({"transports": [pb.TransportOffer(name="gloo", reach="here")]}, "VERSION"),
        ({"transports": [pb.TransportOffer(name="by hand", reach="elsewhere")]}, "VERSION"),
        ({"transports": []}, "VERSION"),
        ({"fingerprint": "other"}, "FINGERPRINT"),
        ({"layout": convert.layout_to_pb(replace(LAYOUT, dtype="bfloat16"))}, "FINGERPRINT"),
        ({"layout": convert.layout_to_pb(replace(LAYOUT, tensors=("latent",)))}, "FINGERPRINT"),
        ({"layout": convert.layout_to_pb(KVLayout(1, 1, 1, 1, "float32", ()))}, "FRAME"),  # no layout at all
        ({"receiver": convert.ref_to_pb(replace(D, incarnation=Incarnation(8, 2)))}, "STALE"),
        ({"receiver": convert.ref_to_pb(replace(D, worker_id="decode-1"))}, "STALE"),
    ],
)
def test_hello_of_another_kind_is_refused(receiver: Receiver, change, reason: str) -> None:
    call = receiver.call()
    call.hello(**change)
    assert [call.hear(), call.hear()] == [reason, "ended"]
    assert not receiver.table.events


def test_welcome_says_what_holds_for_the_channel(receiver: Receiver) -> None:
    call = receiver.call()
    call.hello(transports=[pb.TransportOffer(name=n, reach="here") for n in ("other", "by hand")])
    reply = call.next()
    assert isinstance(reply, pb.PeerReply)
    assert reply.welcome == pb.PeerWelcome(credits=2, frame_size=LAYER, transport="by hand")


def test_a_stream_begins_with_hello(receiver: Receiver) -> None:
    call = receiver.call()
    call.offer()
    assert [call.hear(), call.hear()] == ["VERSION", "ended"]  # there is none in an empty hello


def test_a_stream_that_says_nothing_is_given_up() -> None:
    with running(Receiver(replace(SMALL, frame_deadline_s=0.2))) as receiver:
        call = receiver.call()
        assert [call.hear(), call.hear()] == ["FRAME", "ended"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "other"}, "FINGERPRINT"),
        ({"known_tokens": 9}, "LENGTH"),
        ({"known_tokens": 0}, "LENGTH"),
        ({"skip": 8}, "LENGTH"),
        ({"skip": 9}, "LENGTH"),
        ({"known_tokens": 2**32 - 1}, "LENGTH"),
        ({"handoff": {"request_id": "other", "attempt": 1}}, "STALE"),
        ({"handoff": {"request_id": "r", "attempt": 2}}, "STALE"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused_and_the_channel_lives(receiver: Receiver, change, reason: str) -> None:
    call = receiver.call().welcomed()
    call.offer(**change)
    assert call.hear() == reason
    call.offer()
    assert call.hear() == "offer_accepted"
    call.offer()
    assert call.hear() == "STALE"


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 1 << 30},
        {"nbytes": LAYER + 1},
        {"nbytes": LAYER - 1},
        {"nbytes": 0},
        {"sequence": 1},
        {"layer_end": 3, "nbytes": 3 * LAYER},  # it goes on, but is more than a slot holds
        {"layer_begin": 1},
        {"layer_begin": 3, "layer_end": 4},
        {"layer_begin": 2**32 - 1},
        {"begin": 1, "nbytes": LAYER // 8 * 7},
        {"end": 9, "nbytes": LAYER // 8 * 9},
        {"begin": 8, "nbytes": 0},
        {"handoff": {"request_id": "other", "attempt": 1}},
        {"handoff": {"request_id": "r", "attempt": 2}},
        {"handoff": None},  # a piece of a probe, and it is not
        {"handoff": None, "layer_end": 0, "end": 0, "nbytes": LAYER - 1},
        {"handoff": None, "layer_end": 0, "end": 0, "sequence": probe.FRAMES},
    ],
)
def test_a_frame_that_does_not_go_on_closes_the_channel_before_a_receive(receiver: Receiver, change) -> None:
    call = receiver.call().offered()
    call.frame(**change)
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]
    assert not receiver.end.expected
    assert receiver.table.events[-1] == ("lost", P)


@pytest.mark.parametrize(
    "second",
    [
        {"layer_begin": 0, "layer_end": 1},  # twice
        {"layer_begin": 0, "layer_end": 1, "begin": 4, "nbytes": LAYER // 2},  # in part
        {"sequence": 0},
        {"sequence": 2},
    ],
)
def test_a_second_frame_that_does_not_go_on_closes_the_channel(receiver: Receiver, second) -> None:
    call = receiver.call().offered()
    call.frame(0)
    call.frame(1, **second)
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]
    assert [number for number, _ in receiver.end.expected] in ([], [0])


def test_what_was_skipped_is_not_accepted(receiver: Receiver) -> None:
    call = receiver.call().welcomed()
    call.offer(skip=4)
    assert call.hear() == "offer_accepted"
    call.frame(0)
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]


def test_more_frames_than_credits_close_the_channel(receiver: Receiver) -> None:
    call = receiver.call().offered()
    for layer in range(3):
        call.frame(layer)
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]


def test_what_is_announced_is_expected_ahead_and_a_credit_follows_the_write() -> None:
    entered, leave, data = threading.Event(), threading.Event(), make_kv(1)

    def hold() -> None:
        entered.set()
        leave.wait(scaled(5))

    def wire(layer: int) -> torch.Tensor:
        out = torch.empty(LAYER, dtype=torch.uint8)
        data.gather(range(layer, layer + 1), [5, 6], 0, 8, out)
        return out

    with running(Receiver(replace(SMALL, credits=3))) as receiver:
        receiver.table.hold = hold
        call = receiver.call().offered()
        call.frame(0)
        receiver.end.arrive(wire(0))
        assert entered.wait(scaled(5))
        call.frame(1)
        call.frame(2)
        call.offer()  # answered when the frames were read from the stream
        assert call.hear() == "STALE"  # and no credit: the slot of frame 0 is still read
        leave.set()
        reply = call.next()
        assert isinstance(reply, pb.PeerReply)
        assert reply.credit == pb.Credit(sequence=0)
        assert settled(lambda: receiver.end.waited == [0, 1])
        assert receiver.end.expected == [(0, LAYER), (1, LAYER), (2, LAYER)]  # the last before the one before it came
        receiver.end.arrive(wire(1))
        receiver.end.arrive(wire(2))
        assert [call.hear(), call.hear()] == ["credit", "credit"]
        assert torch.equal(receiver.kv.k[:, [11, 12]], data.k[:, [5, 6]])
        assert torch.equal(receiver.kv.v[:, [11, 12]], data.v[:, [5, 6]])


@pytest.mark.parametrize("frames", [0, 2])
def test_a_commit_before_its_last_frame_closes_the_channel(receiver: Receiver, frames: int) -> None:
    call = receiver.call().offered()
    for layer in range(frames):
        call.frame(layer)
        receiver.end.arrive(torch.zeros(LAYER, dtype=torch.uint8))
        assert call.hear() == "credit"
    call.commit()
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]
    assert not receiver.table.commits


def test_a_commit_of_what_was_not_offered_is_stale(receiver: Receiver) -> None:
    call = receiver.call().welcomed()
    call.commit()
    assert call.hear() == "STALE"


def whole(receiver: Receiver, call: Call) -> list[bytes]:
    """All frames of the handoff, zeros, in their blocks; their digests."""
    zeros = torch.zeros(LAYER, dtype=torch.uint8)
    for layer in range(3):
        call.frame(layer)
        receiver.end.arrive(zeros)
        assert call.hear() == "credit"
    return [wire_digest(zeros)] * 3


def test_a_commit_counts_once(receiver: Receiver) -> None:
    call = receiver.call().offered()
    digests = whole(receiver, call)
    for answer in ("commit_ack", "STALE"):
        call.commit(digests=digests)
        assert call.hear() == answer
    assert list(receiver.table.commits) == [JOB.handoff]


@pytest.mark.parametrize("tokens", [7, 9])
def test_a_commit_of_another_length_closes_the_channel(receiver: Receiver, tokens: int) -> None:
    call = receiver.call().offered()
    call.commit(tokens, whole(receiver, call))
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]
    assert not receiver.table.commits


@pytest.mark.parametrize("digests", [[], [b"other"] * 3, [b"one too many"]])
def test_a_commit_of_other_bytes_is_refused_and_the_channel_lives(receiver: Receiver, digests) -> None:
    call = receiver.call().offered()
    right = whole(receiver, call)
    call.commit(digests=digests if len(digests) != 1 else right + digests)
    assert call.hear() == "DIGEST"
    assert not receiver.table.commits
    receiver.table.wait_for(("aborted", JOB.handoff))
    receiver.table.reserve(JOB.handoff, [11, 12])
    call.offer()
    assert call.hear() == "offer_accepted"


def test_frames_of_a_handoff_that_was_given_up_are_taken_and_dropped(receiver: Receiver) -> None:
    call = receiver.call().offered()
    call.frame(0)
    call.say(abort=pb.AbortHandoff(handoff=HANDOFF))
    receiver.table.wait_for(("aborted", JOB.handoff))
    receiver.end.arrive(torch.ones(LAYER, dtype=torch.uint8))
    assert call.hear() == "credit"
    assert not receiver.kv.k.any()
    call.frame(1)
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]


def test_a_newer_generation_takes_over_and_an_older_one_is_refused(receiver: Receiver) -> None:
    first, second, third = receiver.call(), receiver.call(generation=4), receiver.call(generation=4)
    first.offered()
    second.welcomed()
    assert [first.hear(), first.hear()] == ["BROKEN", "ended"]
    assert receiver.table.events == [("offer", JOB.handoff), ("lost", P)]
    third.hello()
    assert [third.hear(), third.hear()] == ["STALE", "ended"]
    assert receiver.table.events == [("offer", JOB.handoff), ("lost", P)]


@pytest.mark.parametrize("command", [{"abort": pb.AbortHandoff()}, {"hello": pb.PeerHello()}, {}])
def test_messages_that_make_no_sense_end_the_stream(receiver: Receiver, command) -> None:
    call = receiver.call().welcomed()
    call.say(**command)
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]
    assert receiver.table.events == [("lost", P)]


def test_a_generation_is_over_for_good_when_its_channel_has_ended(receiver: Receiver) -> None:
    first = receiver.call().welcomed()
    first.spoil()
    assert [first.hear(), first.hear()] == ["FRAME", "ended"]
    for generation, heard in ((2, ["STALE", "ended"]), (3, ["STALE", "ended"]), (4, ["welcome"])):
        call = receiver.call(generation=generation)
        call.hello()
        assert [call.hear() for _ in heard] == heard


def test_nothing_is_received_or_written_after_the_end(receiver: Receiver) -> None:
    call = receiver.call().offered()
    call.frame(0)
    call.frame(1)
    assert settled(lambda: receiver.end.waited == [0])
    call.spoil()
    assert [call.hear(), call.hear()] == ["FRAME", "ended"]
    receiver.table.reserve(JOB.handoff, [11, 12])
    receiver.table.bound[JOB.handoff] = P  # as by a newer channel of the same sender
    receiver.end.arrive(torch.ones(LAYER, dtype=torch.uint8))
    receiver.end.arrive(torch.ones(LAYER, dtype=torch.uint8))
    assert settled(lambda: not sessions())
    assert receiver.end.waited == [0]
    assert not receiver.kv.k.any()
