"""The receiver rejects senders that break the protocol, with the reason and without posting a receive."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core import PROTOCOL_VERSION, Incarnation, KVLayout
from baton.rpc import convert
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import wire as probe
from tests.support.waiting import eventually
from tests.unit.kvtransfer.byhand import DIGESTS, HANDOFF, JOB, SMALL, Call, Receiver, announcement, commit_of, sessions
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.support import LAYER, LAYOUT, D, P, make_kv, same_kv

ONES = torch.ones(LAYER, dtype=torch.uint8)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(params=["stream", "control socket"])
def call(request: pytest.FixtureRequest) -> Iterator[Call]:
    """A call with an accepted offer. Its frames and its commit are sent this way."""
    with Receiver(control_socket=request.param == "control socket") as receiver:
        yield receiver.call().offered()


OTHER_LAYOUTS: dict[str, Any] = {"dtype": "bfloat16", "tensors": ("latent",), "head_dim": 16, "layers": 4}
OTHER_HANDOFFS = [{"request_id": "other", "attempt": 1}, {"request_id": "r", "attempt": 2}]
OTHER_TRANSPORTS = [[], [pb.TransportOffer(name="gloo", reach="here")], [pb.TransportOffer(name="by hand", reach="?")]]


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        *(({"protocol_version": PROTOCOL_VERSION + n}, "VERSION", str(PROTOCOL_VERSION)) for n in (-1, 1)),
        *(({"transports": offers}, "VERSION", "by hand") for offers in OTHER_TRANSPORTS),
        ({"fingerprint": "other"}, "FINGERPRINT", "'other'"),
        *(
            ({"layout": convert.layout_to_pb(replace(LAYOUT, **{name: value}))}, "FINGERPRINT", repr(value))
            for name, value in OTHER_LAYOUTS.items()
        ),
        ({"layout": convert.layout_to_pb(KVLayout(1, 1, 1, 1, "float32", ()))}, "FRAME", ""),  # not a valid layout
        ({"receiver": convert.ref_to_pb(replace(D, incarnation=Incarnation(8, 2)))}, "STALE", str(D)),
        ({"receiver": convert.ref_to_pb(replace(D, worker_id="decode-1"))}, "STALE", str(D)),
    ],
)
def test_hello_of_another_kind_is_refused_by_name(receiver: Receiver, change, reason: str, named: str) -> None:
    call = receiver.call()
    call.hello(**change)
    call.refused(reason, named)
    assert not receiver.table.events


def test_welcome_says_what_holds_for_the_channel(receiver: Receiver) -> None:
    call = receiver.call()
    call.hello(transports=[pb.TransportOffer(name=n, reach="here") for n in ("other", "by hand")])
    refused = common.LeftOut(transport="other", reason="peer")
    welcome = pb.PeerWelcome(credits=2, frame_size=LAYER, transport="by hand", left_out=[refused])
    assert call.next() == pb.PeerReply(welcome=welcome)


def test_a_stream_that_says_nothing_is_given_up() -> None:
    with Receiver(replace(SMALL, frame_deadline_s=0.2)) as receiver:
        receiver.call().refused("FRAME")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "other"}, "FINGERPRINT"),
        *(({"known_tokens": tokens}, "LENGTH") for tokens in (0, 9, 2**32 - 1)),
        *(({"skip": tokens}, "LENGTH") for tokens in (8, 9)),
        *(({"handoff": other}, "STALE") for other in OTHER_HANDOFFS),
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


FIRST_FRAMES: list[dict[str, Any]] = [
    {"nbytes": LAYER - 1},  # `test_plan.py` has the other frames that do not go on
    {"layer_begin": 2**32 - 1},
    {"sequence": 1},
    {"layer_end": 3, "nbytes": 3 * LAYER},  # the next frame, but larger than a slot
    *({"handoff": other} for other in OTHER_HANDOFFS),
    {"handoff": None},  # claims to be part of a probe
    {"handoff": None, "layer_end": 0, "end": 0, "nbytes": LAYER - 1},
    {"handoff": None, "layer_end": 0, "end": 0, "sequence": probe.FRAMES},
]
# a frame twice, and wrong numbers
SECOND_FRAMES: list[dict[str, Any]] = [{"layer_begin": 0, "layer_end": 1}, {"sequence": 0}, {"sequence": 2}]


@pytest.mark.parametrize(
    ("before", "change"), [*((0, each) for each in FIRST_FRAMES), *((1, each) for each in SECOND_FRAMES)]
)
def test_a_frame_that_does_not_go_on_closes_the_channel_before_a_receive(call: Call, before: int, change) -> None:
    call.arrived(range(before)).frame(before, **change)
    call.refused("FRAME")
    assert call.receiver.end.expected == [(0, LAYER)] * before
    assert call.receiver.table.events[-1] == ("lost", P)


def test_more_frames_than_credits_are_never_expected(call: Call) -> None:
    """They close the channel. On a control socket, a frame may also stay unread until a slot is free."""
    for layer in range(3):
        call.frame(layer)
    end = call.receiver.end
    if end.control_socket is None:
        call.refused("FRAME")
    eventually(lambda: end.waited or end.closed)
    assert len(end.expected) <= 2


def test_what_is_announced_is_expected_ahead_and_a_credit_follows_the_write() -> None:
    data, wire = make_kv(1), torch.empty(3, LAYER, dtype=torch.uint8)
    for layer in range(3):
        data.gather(range(layer, layer + 1), [5, 6], 0, 8, wire[layer])
    with Receiver(replace(SMALL, credits=3)) as receiver:
        write = Stopped(receiver.table, "writing")
        call = receiver.call().offered()
        call.frame(0)
        receiver.end.arrive(wire[0])
        write.wait()
        call.frame(1)
        call.frame(2)
        call.offer()  # answered after the frames were read from the stream
        assert call.hear() == "STALE"  # and no credit: the slot of frame 0 is still read
        write.go_on()
        assert call.next() == pb.PeerReply(credit=pb.Credit(sequence=0))
        eventually(lambda: receiver.end.waited == [0, 1])
        assert receiver.end.expected == [(0, LAYER), (1, LAYER), (2, LAYER)]  # the last before the one before it came
        receiver.end.arrive(wire[1])
        receiver.end.arrive(wire[2])
        assert [call.hear(), call.hear()] == ["credit", "credit"]
        assert same_kv(receiver.kv, [11, 12], data, [5, 6], 8)


@pytest.mark.parametrize(("frames", "tokens"), [(0, 8), (1, 8), (2, 8), (3, 7), (3, 9)])
def test_a_commit_before_its_last_frame_or_of_another_length_closes_the_channel(
    call: Call, frames: int, tokens: int
) -> None:
    call.arrived(range(frames)).commit(tokens)
    call.refused("FRAME")
    assert not call.receiver.table.commits


def test_a_commit_counts_once(call: Call) -> None:
    call.arrived()
    for answer in ("commit_ack", "STALE"):
        call.commit()
        assert call.hear() == answer
    assert list(call.receiver.table.commits) == [JOB.handoff]


@pytest.mark.parametrize("digests", [[], [b"other"] * 3, [*DIGESTS, b"one too many"]])
def test_a_commit_of_other_bytes_is_refused_and_the_channel_lives(call: Call, digests: list[bytes]) -> None:
    call.arrived().commit(digests=digests)
    assert call.hear() == "DIGEST"
    table = call.receiver.table
    assert not table.commits
    table.wait_for(("aborted", JOB.handoff))
    table.reserve(JOB.handoff, [11, 12])
    eventually(lambda: not call.receiver.peer.service._sessions[-1]._receive_loop.inbound)
    call.offer()
    assert call.hear() == "offer_accepted"


def test_frames_of_a_handoff_that_was_given_up_are_taken_and_dropped(receiver: Receiver) -> None:
    call = receiver.call().offered()
    call.frame(0)
    call.abort()
    receiver.end.arrive(ONES)
    assert call.hear() == "credit"
    assert not receiver.kv.k.any()
    call.frame(1)
    call.refused("FRAME")


def test_a_newer_generation_takes_over_and_an_older_one_is_refused(receiver: Receiver) -> None:
    first, second, third = receiver.call(), receiver.call(generation=4), receiver.call(generation=4)
    first.offered()
    second.welcomed()
    first.refused("BROKEN")
    third.hello()
    third.refused("STALE")
    assert receiver.table.events == [("offer", JOB.handoff), ("lost", P)]


def test_another_worker_of_the_same_incarnation_has_a_channel_of_its_own(receiver: Receiver) -> None:
    """A ledger that returned with an older copy may have given it twice."""
    receiver.call().offered()
    other = receiver.call(replace(P, worker_id="prefill-9"), generation=2)
    other.welcomed()
    assert receiver.table.events == [("offer", JOB.handoff)]


@pytest.mark.parametrize("command", [{"abort": pb.AbortHandoff()}, {"hello": pb.PeerHello()}, {}])
def test_messages_that_make_no_sense_end_the_stream_and_its_generation_for_good(receiver: Receiver, command) -> None:
    first = receiver.call().welcomed()
    first.say(**command)
    first.refused("FRAME")
    assert receiver.table.events == [("lost", P)]
    for generation in (2, 3):
        old = receiver.call(generation=generation)
        old.hello()
        old.refused("STALE")
    receiver.call(generation=4).welcomed()


def test_nothing_is_received_or_written_after_the_end(receiver: Receiver) -> None:
    call = receiver.call().offered()
    call.frame(0)
    call.frame(1)
    eventually(lambda: receiver.end.waited == [0])
    call.say(abort=pb.AbortHandoff())  # invalid: the session ends
    call.refused("FRAME")
    receiver.table.reserve(JOB.handoff, [11, 12])
    receiver.table.bound[JOB.handoff] = P  # as by a newer channel of the same sender
    receiver.end.arrive(ONES)
    receiver.end.arrive(ONES)
    eventually(lambda: not sessions())
    assert receiver.end.waited == [0]
    assert not receiver.kv.k.any()


# Frames on the control socket, which only `after` orders with the Peer stream


@pytest.fixture
def socket_call() -> Iterator[Call]:
    with Receiver(control_socket=True) as receiver:
        yield receiver.call().offered()


def test_credits_and_the_acknowledgement_come_back_the_same_way() -> None:
    with Receiver(replace(SMALL, credits=4), control_socket=True) as receiver:
        call = receiver.call().offered().arrived(range(2))
        call.frame(2)
        call.commit()
        receiver.end.arrive()
        assert [call.hear(), call.hear()] == ["commit_ack", "credit"]  # a request waits for the first one
        assert list(receiver.table.commits) == [JOB.handoff]
        assert call.beside == ["credit", "credit", "commit_ack", "credit"]


def test_a_commit_that_an_abort_has_overtaken_is_refused(socket_call: Call) -> None:
    socket_call.arrived().abort(after=3)
    socket_call.commit()
    assert socket_call.hear() == "STALE"
    assert not socket_call.receiver.table.commits


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_commit_waits_for_the_frames_that_it_comes_after(socket_call: Call, before: int) -> None:
    socket_call.arrived(range(before)).say(commit=commit_of(), after=3)
    for layer in range(before, 3):
        assert not socket_call.receiver.table.commits
        socket_call.arrived([layer])
    assert socket_call.hear() == "commit_ack"
    assert list(socket_call.receiver.table.commits) == [JOB.handoff]


def test_frames_that_an_abort_has_overtaken_are_taken_and_dropped(socket_call: Call) -> None:
    receiver = socket_call.receiver
    socket_call.abort(after=2)
    socket_call.arrived(range(2))
    assert not receiver.kv.k.any()
    receiver.table.reserve(JOB.handoff, [11, 12])
    eventually(lambda: not any(session._receive_loop.inbound for session in receiver.peer.service._sessions))
    socket_call.offer()
    assert socket_call.hear() == "offer_accepted"


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
def test_a_packet_that_is_neither_announcement_nor_commit_ends_the_session(socket_call: Call, packet: bytes) -> None:
    socket_call.send(packet)
    assert socket_call.hear() in {"FRAME", "BROKEN"}
    assert socket_call.hear() == "ended"


def test_a_sender_that_is_gone_ends_the_session(socket_call: Call) -> None:
    socket_call.receiver.end.leave()
    socket_call.refused("BROKEN")


def test_the_end_of_the_stream_wakes_the_thread(socket_call: Call) -> None:
    assert len(sessions()) == 1
    socket_call.stream.close()
    eventually(lambda: not sessions())


def test_a_frame_that_is_announced_the_other_way_ends_the_session(socket_call: Call) -> None:
    socket_call.arrived([0]).say(frame=announcement(1))
    socket_call.refused("FRAME")
