"""A channel is selected and probed before the first offer: its transport, and whether it preserves bytes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.core import LeftOut
from baton.engine.memory.exposed import pattern
from baton.errors import ChannelBroken
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import wire
from kvtransfer.transports.base import Choice, Ring
from kvtransfer.wire import VersionRefused
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.byhand import SMALL, ZEROS, Call, Receiver
from tests.unit.kvtransfer.ends import FlippingEnd, Wrapped, wrapped
from tests.unit.kvtransfer.support import SETTINGS, D, P, same_kv


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 64, 4097])
def test_no_two_words_and_no_two_frames_are_alike(nbytes: int) -> None:
    pieces = [pattern(number, nbytes) for number in range(wire.FRAMES)]
    assert all((piece.dtype, piece.shape) == (torch.uint8, (nbytes,)) for piece in pieces)
    whole = nbytes // 8 * 8
    words = torch.cat([piece[:whole].view(torch.int64) for piece in pieces]).tolist()
    assert len(set(words)) == len(words)
    assert nbytes < 8 or len({bytes(piece.tolist()) for piece in pieces}) == wire.FRAMES


def test_a_frame_of_the_probe_is_a_rectangle_of_nothing_that_fills_a_slot_up_to_a_limit() -> None:
    assert wire.frame(Ring(4, 1000)).nbytes == 1000
    assert wire.frame(Ring(4, 1 << 30)).nbytes == 1 << 20
    assert not wire.frame(Ring(4, 1000)).layers


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("frame", [0, 2])
def test_a_channel_that_changes_bytes_is_never_used_and_the_next_one_is_tried(pairs, slots: int, frame: int) -> None:
    """Nothing is offered, whether the sender receives the reason or first sees the receiver's end close."""
    wraps = [lambda end: FlippingEnd(end, frame)]
    recv = wrapped(lambda end: wraps.pop()(end) if wraps else end)
    pair = pairs(replace(SETTINGS, credits=slots), recv=recv)
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), ChannelBroken)
    pair.table.wait_for(("lost", P))
    assert pair.table.events == [("lost", P)]
    assert not any(command.HasField("offer") for command in pair.stream.said)
    pair.reports.done(pair.push("again", 8, [1, 2], [11, 12]))
    assert same_kv(pair.source, [1, 2], pair.target, [11, 12], 8)


def test_the_probe_comes_before_the_first_offer_and_only_once(pair) -> None:
    for name in ("a", "b"):
        pair.reports.done(pair.push(name, 8, [1, 2], [11, 12]))
    said = [command.WhichOneof("command") for command in pair.stream.said]
    frames = [frame for command in pair.stream.said for frame in (command.frame, *command.more) if frame.nbytes]
    assert [kind for kind in said if kind != "frame"] == ["hello", *["offer", "commit"] * 2]
    assert said.index("offer") > said.index("frame")
    assert [frame.HasField("handoff") for frame in frames] == [False] * wire.FRAMES + [True] * 2


PROBE = wire.frame(Ring(SMALL.credits, SMALL.frame_size))


def probed(call: Call, number: int, data: torch.Tensor) -> None:
    call.say(frame=pb.FrameAnnounce(sequence=number, nbytes=PROBE.nbytes))
    call.receiver.end.arrive(data)


def test_a_receiver_answers_the_probe_once_and_takes_no_more_of_it() -> None:
    with Receiver() as receiver:
        call = receiver.call().welcomed()
        for number in range(wire.FRAMES):
            probed(call, number, pattern(number, PROBE.nbytes))
            if number == wire.FRAMES - 1:
                assert call.hear() == "probed"
            assert call.hear() == "credit"
        call.say(frame=pb.FrameAnnounce(sequence=wire.FRAMES, nbytes=PROBE.nbytes))
        call.refused("FRAME")
        assert len(receiver.end.expected) == wire.FRAMES


def flipped(number: int) -> torch.Tensor:
    piece = pattern(number, PROBE.nbytes)
    piece[len(piece) // 2] ^= 1
    return piece


@pytest.mark.parametrize("at", range(wire.FRAMES))
@pytest.mark.parametrize(
    "spoilt",
    [flipped, lambda number: pattern(number + 1, PROBE.nbytes), lambda number: ZEROS],
    ids="flipped swapped stale".split(),
)
def test_a_channel_that_changes_bytes_is_refused_by_name(spoilt: Callable[[int], torch.Tensor], at: int) -> None:
    with Receiver() as receiver:
        call = receiver.call().welcomed()
        for number in range(at):
            probed(call, number, pattern(number, PROBE.nbytes))
            assert call.hear() == "credit"
        probed(call, at, spoilt(at))
        call.refused("FRAME", f"the by hand channel changes bytes: frame {at}")


def named(*names: str):
    """Return working transports with these names, each "name" or "name@reach"."""
    parts = [name.partition("@") for name in names]
    return lambda memory: [Wrapped(memory, name=name, reach=reach) for name, _, reach in parts]


@pytest.mark.parametrize(
    ("send", "recv", "chosen"),
    [
        (["fast", "slow"], ["fast", "slow"], "fast"),
        (["fast", "slow"], ["slow", "fast"], "fast"),  # the sender's order counts
        (["new", "slow"], ["fast", "slow"], "slow"),
        (["fast@here", "slow"], ["fast@here", "slow"], "fast"),
        (["fast@here", "slow"], ["fast@there", "slow"], "slow"),
        (["fast@here", "slow"], ["fast", "slow"], "slow"),
    ],
)
def test_the_best_that_both_have_is_used(pairs, send, recv, chosen: str) -> None:
    pair = pairs(send=named(*send), recv=named(*recv))
    handoff = pair.push("r", 8, [1, 2], [11, 12])
    assert pair.reports.done(handoff).transport == chosen
    assert pair.table.commits[handoff].transport == chosen
    assert same_kv(pair.source, [1, 2], pair.target, [11, 12], 8)


def one_sided_receiver(memory) -> list[Wrapped]:
    shm, gloo = named("shm", "gloo")(memory)
    shm.sends = False
    return [shm, gloo]


NCCL_LACKS, SHM_LACKS = LeftOut("nccl", "unavailable", "KV is on cpu"), LeftOut("shm", "unavailable", "no memory files")
LEFT_OUT = {
    "nothing better": (named("shm", "gloo"), named("shm", "gloo"), []),
    "other hosts": (named("shm@a", "gloo"), named("shm@b", "gloo"), [LeftOut("shm", "reach")]),
    "several": (
        named("shm@a", "cuda_ipc", "gloo", "grpc"),
        named("shm@b", "grpc"),
        [LeftOut("shm", "reach"), LeftOut("cuda_ipc", "peer"), LeftOut("gloo", "peer")],
    ),
    "not here": (lambda m: Choice(named("gloo")(m), [NCCL_LACKS]), named("gloo"), [NCCL_LACKS]),
    "not there": (
        named("shm", "gloo"),
        lambda m: Choice(named("gloo")(m), [SHM_LACKS]),
        [LeftOut("shm", "peer", "no memory files")],
    ),
    "worse": (lambda m: Choice(named("shm")(m), [NCCL_LACKS]), named("shm"), []),
    "private": (one_sided_receiver, named("shm", "gloo"), [LeftOut("shm", "unavailable", "its KV is private")]),
}


@pytest.mark.parametrize("of", LEFT_OUT)
@pytest.mark.parametrize("old", [False, True], ids=["", "old receiver"])
def test_a_channel_has_the_reason_for_each_better_transport(pairs, of: str, old: bool) -> None:
    send, recv, expected = LEFT_OUT[of]

    def heard(reply: pb.PeerReply) -> bool:
        if old:
            reply.welcome.ClearField("left_out") if reply.HasField("welcome") else None
        return True

    pair = pairs(send=send, recv=recv, heard=heard)
    pair.reports.done(pair.push("r", 8, [1, 2], [11, 12]))
    silent = [LeftOut(one.transport, "unknown") if one.reason in {"peer", "reach"} else one for one in expected]
    assert list(pair.sender.channels()[0].left_out) == (silent if old else expected)


@pytest.mark.parametrize(
    ("send", "recv"), [(["one", "two"], ["three", "four"]), (["one@here", "two"], ["one@there", "four"]), ([], ["one"])]
)
def test_none_in_common_is_refused_and_both_lists_are_named(pairs, send, recv) -> None:
    pair = pairs(send=named(*send), recv=named(*recv))
    names = [name.partition("@")[0] for name in (*send, *recv)]
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), VersionRefused, *names)
    assert not pair.table.events


class Breaking:
    """A transport that fails for the first `times` ends, when it is opened or in its probe."""

    def __init__(self, memory, name: str, times: int, when: str) -> None:
        self._left, self._when = times, when
        self._inner = Wrapped(memory, lambda end: FlippingEnd(end, 0), name)
        self._sound = Wrapped(memory, name=name)
        self.name, self.reach = name, ""
        self.one_sided, self.sends = False, True

    def open(self, *args):
        self._left -= 1
        if self._left < 0:
            return self._sound.open(*args)
        if self._when == "opened":
            raise ChannelBroken("no peer access")
        return self._inner.open(*args)


@pytest.mark.parametrize(("side", "when"), [("sender", "opened"), ("receiver", "opened"), ("receiver", "probed")])
def test_a_transport_that_cannot_be_opened_is_the_last_choice_for_this_worker(pairs, side: str, when: str) -> None:
    settings = replace(SETTINGS, frame_deadline_s=scaled(0.5) if side == "sender" else SETTINGS.frame_deadline_s)

    def first(memory, breaks: bool):
        return [Breaking(memory, "fast", int(breaks), when), *named("slow")(memory)]

    pair = pairs(settings, send=lambda m: first(m, side == "sender"), recv=lambda m: first(m, side == "receiver"))
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), ChannelBroken)
    for name in ("again", "and again"):
        assert pair.reports.done(pair.push(name, 8, [1, 2], [11, 12])).transport == "slow"
    [failed] = pair.sender._choice(D).left_out
    assert (failed.transport, failed.reason) == ("fast", "failed")
    assert ("no peer access" if when == "opened" else "changes bytes") in failed.detail


def test_the_next_incarnation_of_a_worker_gets_the_best_transport_again(pairs) -> None:
    pair = pairs(send=lambda m: [Breaking(m, "fast", 1, "opened"), *named("slow")(m)], recv=named("fast", "slow"))
    reborn = replace(D, incarnation=replace(D.incarnation, counter=D.incarnation.counter + 1))
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), ChannelBroken)
    pair.reports.done(pair.push("again", 8, [1, 2], [11, 12]))
    assert [one.name for one in pair.sender._choice(D).transports] == ["slow", "fast"]
    assert [one.name for one in pair.sender._choice(reborn).transports] == ["fast", "slow"]


def test_the_only_transport_is_tried_again(pairs) -> None:
    pair = pairs(send=lambda memory: [Breaking(memory, "fast", 1, "opened")], recv=named("fast"))
    pair.reports.failed(pair.push("r", 8, [1, 2], [11, 12]), ChannelBroken, "no peer access")
    assert pair.reports.done(pair.push("again", 8, [1, 2], [11, 12])).transport == "fast"
